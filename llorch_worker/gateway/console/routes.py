"""``/console/api``: what the console's page asks. It may change with the page, so OpenAPI leaves it
out; scripts use ``llorch status`` and ``llorch dead``."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Annotated, Generic, Literal, TypeVar

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, Field
from redis import Redis
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect_impatient
from llorch_worker.broker.figures.fleet import Fleet, FleetReader
from llorch_worker.broker.figures.history import history
from llorch_worker.broker.figures.listed_jobs import Listing, listed_jobs
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.broker.jobs.ended_jobs import ended_jobs
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.console.documents import (
    WORKER_ORDERS,
    EndedJobs,
    FleetDocument,
    History,
    Jobs,
    Letter,
    Letters,
    Pulse,
    Session,
)
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.gateway import TheCaller, TheGateway
from llorch_worker.openai_api.shape import WholeBody

LISTED_JOBS = 50
LISTED_WORKERS = 50
LISTED_LETTERS = 100
MOST_LISTED = 500
FRESH_S = 2.0
"""How long pages get the same figures; each asks every 3 s."""

Reading = TypeVar("Reading")
Outcome = dead_letters.Retried | Literal["malformed", "dropped"]


class _Kept(Generic[Reading]):
    """A reading for all who ask within :data:`FRESH_S`, also of why there is none."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._last: Reading | RedisError = RedisError("not read yet")
        self._until_s = float("-inf")

    def get(self, read: Callable[[], Reading]) -> Reading:
        """Raises ``RedisError``, also if Redis did not answer then."""
        with self._reading:
            if time.monotonic() > self._until_s:
                try:
                    self._last = read()
                except RedisError as error:
                    self._last = error
                # From now, so that it also holds for those who waited meanwhile.
                self._until_s = time.monotonic() + FRESH_S
            if isinstance(self._last, RedisError):
                raise self._last
            return self._last

    @property
    def is_old(self) -> bool:
        return time.monotonic() > self._until_s


class Console:
    """What the routes share. Redis is read here as the command line reads it, so they are plain
    functions, which FastAPI runs in threads. However many pages ask, each thing is read once in
    :data:`FRESH_S`."""

    def __init__(self, redis_url: str) -> None:
        self.redis: Redis = connect_impatient(redis_url)
        self._fleet: _Kept[Fleet] = _Kept()
        self._pulse: _Kept[Pulse] = _Kept()
        self._listings: dict[Hashable, _Kept[Listing]] = {}
        self._reader = FleetReader(self.redis)

    def fleet(self) -> Fleet:
        """Raises ``RedisError``."""
        return self._fleet.get(self._reader.read)

    def pulse(self) -> Pulse:
        """Raises ``RedisError``."""
        return self._pulse.get(self._read_pulse)

    def listing(self, asked: Hashable, read: Callable[[], Listing]) -> Listing:
        """What ``read`` reads for all who ask the same. Raises ``RedisError``."""
        for old in [each for each, kept in list(self._listings.items()) if kept.is_old]:
            self._listings.pop(old, None)
        return self._listings.setdefault(asked, _Kept()).get(read)

    def _read_pulse(self) -> Pulse:
        version = dead_letters.version(self.redis)
        return Pulse(dead_letters=dead_letters.count(self.redis), version=version)

    def close(self) -> None:
        self.redis.close()


class ChosenLetters(WholeBody):
    """A body, and so JSON: a page of another origin cannot send it without asking first."""

    ids: list[str] = Field(min_length=1, max_length=LISTED_LETTERS)


class Outcomes(BaseModel):
    """What became of each letter. ``gone``: somebody else was faster."""

    outcomes: dict[str, Outcome]


# Coroutines, because FastAPI hands plain functions to a thread.


async def _console(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


async def operator(caller: TheCaller) -> None:
    """Raises ``HttpError`` 401, or 403 for a key that is not an operator's."""
    if not caller.operator:
        message = (
            "this key is not an operator's; its entry in the file of keys has no operator = true"
        )
        raise HttpError(403, "OPERATOR_NEEDED", message)


async def not_stored(response: Response) -> None:
    response.headers["Cache-Control"] = "no-store"


TheConsole = Annotated[Console, Depends(_console)]
Filter = Annotated[str | None, Query(min_length=1, max_length=300)]
router = Router(prefix="/console/api", include_in_schema=False, dependencies=[Depends(not_stored)])
operators = Router(dependencies=[Depends(operator)])


@router.get("/session")
async def session(request: Request, gateway: TheGateway) -> Session:
    """Who sends this header. An unknown key is an answer here, and no error."""
    try:
        caller = gateway.caller(request.headers)
    except HttpError:
        return Session(needs_key=True, signed_in=False)
    needs_key = gateway.own.keys is not None
    return Session(needs_key=needs_key, signed_in=True, name=caller.name, operator=caller.operator)


@operators.get("/pulse")
def pulse(console: TheConsole) -> Pulse:
    return console.pulse()


@operators.get("/fleet")
def fleet(
    console: TheConsole,
    find: Annotated[str, Query(max_length=200)] = "",
    order: Annotated[str, Query(pattern=f"^({'|'.join(WORKER_ORDERS)})$")] = "name",
    limit: Annotated[int, Query(ge=0, le=MOST_LISTED)] = LISTED_WORKERS,
) -> FleetDocument:
    """The totals, the models, and the first ``limit`` workers that hold the words of ``find``."""
    return FleetDocument.of(console.fleet(), time.time(), find.lower().split(), order, limit)


@operators.get("/history", response_model_exclude_none=True)
def past(console: TheConsole) -> History:
    return History(points=history(console.redis))


@router.get("/jobs", response_model_exclude_none=True)
def jobs(
    console: TheConsole,
    caller: TheCaller,
    state: Literal["active", "running", "waiting"] = "active",
    model: Filter = None,
    tenant: Filter = None,
    worker: Filter = None,
    job: Filter = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = LISTED_JOBS,
) -> Jobs:
    """Jobs that run or wait: an operator's those of the whole fleet, any other key's its own."""
    states = ("running", "waiting") if state == "active" else (state,)
    filters = {
        "states": states,
        "model": model,
        "tenant": tenant,
        "worker": worker,
        "owner": None if caller.operator else caller.name,
        "ids": None if job is None else (job,),
    }

    def read() -> Listing:
        return listed_jobs(console.redis, limit, **filters)  # type: ignore[arg-type]

    found = console.listing((limit, *filters.values()), read)
    if caller.operator:
        return Jobs(**dict(found))
    own = Counter(each.state for each in found.jobs)
    counts = {name: own[name] for name in ("running", "waiting", "scheduled")}
    return Jobs(**{**dict(found), **counts})


@operators.get("/ended", response_model_exclude_none=True)
def ended(console: TheConsole) -> EndedJobs:
    return EndedJobs(jobs=ended_jobs(console.redis, LISTED_JOBS))


@operators.get("/dead-letters")
def letters(console: TheConsole) -> Letters:
    # First, so that a letter that comes meanwhile makes another one.
    version = dead_letters.version(console.redis)
    newest = islice(dead_letters.letters(console.redis), LISTED_LETTERS)
    living = {card.hostname: card.started_at for card in registry.workers(console.redis)}
    return Letters(
        total=dead_letters.count(console.redis),
        version=version,
        letters=[Letter.of(each, living) for each in newest],
    )


@operators.post("/dead-letters/retry")
def retry(chosen: ChosenLetters, console: TheConsole) -> Outcomes:
    """Puts jobs back into their queues, with all their attempts."""
    outcomes: dict[str, Outcome] = dict.fromkeys(chosen.ids, "gone")
    for letter in dead_letters.find_all(console.redis, chosen.ids).values():
        outcomes[letter.id] = (
            dead_letters.retry(console.redis, letter) if letter.retriable else "malformed"
        )
    return Outcomes(outcomes=outcomes)


@operators.post("/dead-letters/drop")
def drop(chosen: ChosenLetters, console: TheConsole) -> Outcomes:
    """Deletes letters for good. Their jobs stay failed."""
    outcomes: dict[str, Outcome] = dict.fromkeys(chosen.ids, "gone")
    for letter in dead_letters.find_all(console.redis, chosen.ids).values():
        if dead_letters.drop(console.redis, letter):
            outcomes[letter.id] = "dropped"
    return Outcomes(outcomes=outcomes)


router.include_router(operators)
