"""What each key may use, counted in Redis by all gateways together."""

from __future__ import annotations

import math
from typing import Any

import redis.asyncio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_worker.broker import keys
from llorch_worker.broker.scripts import run_script_async, text
from llorch_worker.broker.waiting.enqueue import LONGEST_WAIT_S
from llorch_worker.contract import GenerationRequest, JobRequest, TextsRequest
from llorch_worker.contract.kinds import Asked
from llorch_worker.gateway.errors import RateLimited, TooManyJobs
from llorch_worker.gateway.keys import Caller, Rate

ENQUEUED_WITHIN_S = 60.0
CHARACTERS_A_TOKEN = 4
ANSWER_TOKENS = 256
"""For the guess of a job's tokens, which its end corrects."""


class Limits:
    """Lets the jobs of keys in that have limits.

    A job takes its place before it is enqueued. Places of jobs that have ended are found again when
    they are needed, and rates empty by themselves, so nothing is lost with a gateway that dies.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        # redis-py's annotations cover all its clients at once.
        self._redis: Any = client

    async def admit(
        self, request: Asked, caller: Caller, job_id: str, *, counts: bool = True
    ) -> Asked:
        """The request, with the lowest priority if it is beyond a soft limit. A job counts once,
        however often it is admitted; among those in flight only if it ``counts``.

        Raises:
            TooManyJobs, RateLimited: a limit that is not soft keeps it out.
        """
        most = (caller.max_jobs or 0) if counts else 0
        if not (most or caller.rates):
            return request
        verdict, wait_ms = await self._ask(request, caller, job_id, most)
        if verdict == "jobs":
            await self._free_ended(keys.key_jobs(caller.name))
            verdict, wait_ms = await self._ask(request, caller, job_id, most)
        if verdict == "admitted":
            return request
        if caller.soft:
            return request.model_copy(update={"priority": "low"})
        if verdict == "jobs":
            raise TooManyJobs(
                f"this key has {caller.max_jobs} jobs in flight, which is its limit; "
                "submit again when one has ended"
            )
        error = RateLimited(
            "this key has reached its limit of requests or tokens; "
            f"submit again in {wait_ms / 1e3:.1f} s"
        )
        error.retry_after_s = max(1, math.ceil(wait_ms / 1e3))
        raise error

    async def leave(self, caller: Caller, job_id: str) -> None:
        """Gives the place in flight back early, because the job ended."""
        if caller.max_jobs is not None:
            await self._redis.zrem(keys.key_jobs(caller.name), job_id)

    async def withdraw(self, caller: Caller, job_id: str) -> None:
        """Gives back what the job got, which was not enqueued."""
        if caller.max_jobs is not None or caller.rates:
            places = [keys.key_jobs(caller.name)]
            await run_script_async(self._redis, "gateway/withdraw", [job_id], places)

    async def _ask(
        self, request: JobRequest, caller: Caller, job_id: str, most: int
    ) -> tuple[str, int]:
        of_tokens = [rate.limit for rate in caller.rates if rate.kind == "tokens"]
        # Else a job that may use more than the limit would never run.
        tokens = min([_guess(request), *of_tokens]) if of_tokens else 0
        rates = [part for r in caller.rates for part in (r.name, r.limit, r.window_ms)]
        verdict, wait_ms, *figures = await run_script_async(
            self._redis,
            "gateway/admit",
            [job_id, caller.name, most, LONGEST_WAIT_S, round(ENQUEUED_WITHIN_S), tokens, *rates],
            [keys.key_jobs(caller.name), keys.key_rates(caller.name)],
        )
        found = sorted(zip(figures[::2], figures[1::2], caller.rates, strict=True), key=_share)
        caller.standing.clear()
        for left, reset_ms, rate in found:
            # The tighter of a kind's.
            caller.standing.setdefault(f"x-ratelimit-limit-{rate.kind}", str(rate.limit))
            caller.standing.setdefault(f"x-ratelimit-remaining-{rate.kind}", str(left))
            caller.standing.setdefault(f"x-ratelimit-reset-{rate.kind}", f"{reset_ms / 1e3:.10g}s")
        return text(verdict), int(wait_ms)

    async def _free_ended(self, places: str) -> None:
        taken = await self._redis.zrange(places, 0, -1, withscores=True)
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id, _ in taken:
                pipe.hmget(keys.job(job_id), "state", "sent")
            records = await pipe.execute()
        # A job that has no record yet may be on its way into the queue.
        seconds, _ = await self._redis.time()
        long_ago_ms = (int(seconds) - ENQUEUED_WITHIN_S) * 1e3
        ended = [
            job_id
            for (job_id, since_ms), (state, sent) in zip(taken, records, strict=True)
            if state == "ended" or (state is None and sent is None and since_ms < long_ago_ms)
        ]
        if ended:
            await self._redis.zrem(places, *ended)


def _share(figures: tuple[int, int, Rate]) -> float:
    left, _, rate = figures
    return left / rate.limit


def _guess(request: JobRequest) -> int:
    """About how many tokens the job will use at most."""
    if isinstance(request, TextsRequest):
        return sum(
            len(each) if isinstance(each, tuple) else len(each) // CHARACTERS_A_TOKEN
            for each in request.all_texts
        )
    assert isinstance(request, GenerationRequest)
    texts = [request.prompt or "", *(str(each.content or "") for each in request.messages or ())]
    prompt = len(request.prompt_token_ids or ()) + sum(map(len, texts)) // CHARACTERS_A_TOKEN
    # Without a maximum, an answer could take the whole context, but hardly one does.
    new = ANSWER_TOKENS if request.most_tokens is None else request.most_tokens
    return prompt + new * request.n


def saying_limits(app: ASGIApp) -> ASGIApp:
    """``app``, with the headers ``x-ratelimit-*`` on each answer to a request whose limits were
    looked at."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        async def saying(message: Message) -> None:
            if message["type"] == "http.response.start":
                caller = scope.get("state", {}).get("caller")
                headers = caller.standing.items() if caller else ()
                said = [(name.encode(), value.encode()) for name, value in headers]
                message = {**message, "headers": [*message["headers"], *said]}
            await send(message)

        await app(scope, receive, saying)

    return limited
