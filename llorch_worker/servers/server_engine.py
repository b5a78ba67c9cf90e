"""A worker's engine that is a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container
from collections.abc import Sequence as Ids
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar, Unpack

from llorch_worker.contract import (
    Cancelled,
    GenerationRequest,
    InternalError,
    JobRequest,
    Journal,
    LlorchError,
    ModelLoadFailed,
    check_task,
)
from llorch_worker.contract.errors import as_told
from llorch_worker.engine.interface import (
    TOKEN_GAP_S,
    Attempt,
    Death,
    DeathLabel,
    EngineDied,
    EngineStats,
    ModelFacts,
    StepFigures,
    TallyCounts,
)
from llorch_worker.engine.mortal import Mortal
from llorch_worker.engine_options import SEQUENCES
from llorch_worker.intake.request_checks import check_model
from llorch_worker.servers.answer import ChoiceSoFar, ServerGeneration
from llorch_worker.servers.asking import Asking
from llorch_worker.servers.bodies import check, is_native
from llorch_worker.servers.connection import (
    BUSY,
    UNREACHED,
    AnswerCut,
    Connection,
    Refusal,
    ServerAway,
    WrongAnswer,
)
from llorch_worker.servers.gathering import GatheringSelector
from llorch_worker.servers.isolation import Isolation
from llorch_worker.servers.probe import Found, check_health, probe

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S: Final = 1.0
"""How often the server is asked whether it lives, and whether it is back."""
LOOK_TIMEOUT_S: Final = 5.0
HUNG_S: Final = 60.0
"""How long a server that listens may answer no look, such as one whose processors are all busy:
taking its jobs back would only make it compute them again."""
CUT_TOGETHER_S: Final = 0.3
"""Answers that are cut within this time are cut by the server's end."""
WANTED_S: Final = 0.2
"""How often a question that a job waits for is checked to be wanted still."""
RATE_LOOKS: Final = 5
CLOSE_S: Final = 10.0
SLOTS_A_WAITING: Final = 4
"""For so many slots of the server, one job more is claimed."""
UNKNOWN_CONTEXT: Final = 2**20
"""Tokens, more than a request may ask for: the server refuses what it does not hold."""
BUSY_S: Final = 60.0
"""How long a job asks a server again that is busy."""
BUSY_PAUSES_S: Final = (0.25, 5.0)
"""Between two times: the first, which doubles, and the longest."""
_AGAIN: Final = (*BUSY, *UNREACHED)
"""What a job is asked again after."""
_GONE: Final = (401, 403, 404)


@dataclass
class Address:
    """A server, and what outlives the engines that it is."""

    url: str
    key: str | None = field(repr=False)
    model: str
    """As the server calls it."""
    served_as: str
    silent_s: float = 60.0
    """See :meth:`.Connection.stream`."""
    last_hands: frozenset[str] = field(default=frozenset(), repr=False)
    """The jobs that it had when it ended last."""


class ServerEngine(Mortal):
    """An ``EngineInterface``. Any thread may call any method; everything happens on an event loop
    with a thread of its own.

    It lives as long as the server answers. When that stops, it dies as a process would.
    """

    def __init__(
        self,
        address: Address,
        connection: Connection,
        found: Found,
        max_sequences: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Made by :meth:`load`, on the event loop."""
        super().__init__()
        self._address = address
        self._asking = Asking(connection, found.served, address.silent_s)
        self._selector = connection.selector
        self._loop = loop
        self.facts = ModelFacts(
            model_name=address.served_as,
            fingerprint=hashlib.sha256("\n".join(found.identity).encode()).hexdigest()[:16],
            arithmetic=found.identity[0],
            max_context=found.served.max_context or UNKNOWN_CONTEXT,
            max_sequences=max_sequences or _with_next(found.slots) or SEQUENCES["server"],
            device=found.served.kind,
            replays=False,
            weakens=found.weakens,
        )
        self._tasks: dict[ServerGeneration, asyncio.Task[None]] = {}
        self._isolation = Isolation()
        self._cuts: set[ServerGeneration] = set()
        self._generated = self._cached = self._finished = 0
        self._prompt_tokens = self._looked_up = 0
        """The first counts a prompt once, the second for each choice, as each is a request."""
        self._token_gaps = TallyCounts(TOKEN_GAP_S)
        self._made: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=RATE_LOOKS)
        self._look_task = loop.create_task(self._look())

    @classmethod
    def load(
        cls, address: Address, *, max_sequences: int | None, wait: Callable[[str], None]
    ) -> Self:
        """Waits until the server answers, and reads what it serves.

        Args:
            max_sequences: how many requests it gets at once; None for as many as it says.
            wait: called about every second with the reason why it is not there yet. May raise.

        Raises:
            ModelLoadFailed: it is no such server, refuses the key, or lacks the model.
        """
        selector = GatheringSelector()
        loop = asyncio.SelectorEventLoop(selector)
        threading.Thread(target=_run, args=(loop,), name="llorch-server", daemon=True).start()
        try:
            while True:
                try:
                    found = cls._find(address, max_sequences, loop, selector)
                    return asyncio.run_coroutine_threadsafe(found, loop).result()
                except (ServerAway, AnswerCut) as error:
                    wait(f"waits for the server at {address.url}: {error}")
                    time.sleep(LOOK_S)
        except BaseException:
            loop.call_soon_threadsafe(loop.stop)
            raise

    @classmethod
    async def _find(
        cls,
        address: Address,
        max_sequences: int | None,
        loop: asyncio.AbstractEventLoop,
        selector: GatheringSelector,
    ) -> Self:
        connection = Connection(address.url, address.key, selector)
        try:
            found = await probe(connection, address.model)
        except BaseException:
            await connection.close()
            raise
        return cls(address, connection, found, max_sequences, loop)

    # The engine's interface ------------------------------------------------------------------

    @property
    def pid(self) -> None:
        """None of this machine's processes."""

    def warm_up(self) -> None: ...

    def continues(
        self,
        request: JobRequest,
        journal: Journal,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Whether a job can go on after the tokens of its journal; True also if it is not wanted
        any more. Raises EngineDied."""
        if journal.terminal is not None or not isinstance(request, GenerationRequest):
            return True
        with self._lock:
            self._require_open()
            work = _patiently(lambda: self._asking.can_continue(request, journal), _AGAIN)
            asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            # A loop that ends meanwhile answers nobody.
            while not wait((asked,), WANTED_S).done:
                if not self.healthy:
                    raise EngineDied(self._death or _away("it is closed"))
                if not is_wanted():
                    asked.cancel()
                    return True
            return asked.result()
        except WrongAnswer:
            return False
        except Refusal as refusal:
            if refusal.status not in _AGAIN:
                return False
            raise _busy(refusal) from None
        except (ServerAway, AnswerCut) as error:
            raise EngineDied(self._death or _away(error)) from None

    def submit(
        self,
        request: GenerationRequest,
        *,
        on_asked: object = None,  # noqa: ARG002 - nothing is prepared here
        **attempt: Unpack[Attempt],
    ) -> ServerGeneration:
        """See :meth:`.EngineInterface.submit`. Raises InvalidRequest for what the server does not
        do; what it refuses itself, the generation raises."""
        check_model(request, self.facts.model_name)
        check_task(request, self.facts.model_name, self.facts.tasks)
        check(request, self._asking.served)
        generation = ServerGeneration(
            request, self.facts, request_cancel=self._request_cancel, **attempt
        )
        with self._lock:
            self._require_open()
            self._selector.hurry()
            self._loop.call_soon_threadsafe(self._begin, generation)
        return generation

    def logits(self, _token_ids: Ids[int]) -> Any:
        raise InternalError("a server does not tell logits")

    def stats(self) -> EngineStats:
        waiting = sum(1 for each in tuple(self._tasks) if not each.began)
        (since_s, made), *_ = self._made
        return EngineStats(
            model=self.facts.model_name,
            device=self.facts.device,
            dtype=self.facts.arithmetic,
            bytes={},
            planned_bytes={},
            measured_bytes={},
            max_context=self.facts.max_context,
            max_sequences=self.facts.max_sequences,
            running=len(self._tasks) - waiting,
            waiting=waiting,
            tokens_per_s=(self._generated - made) / max(1.0, time.monotonic() - since_s),
            prompt_tokens_total=self._looked_up,
            cached_tokens_total=self._cached,
            completion_tokens_total=self._generated,
            finished_total=self._finished,
        )

    def step_figures(self) -> StepFigures:
        return StepFigures(
            token_gaps=self._token_gaps.read(),
            prompt_tokens=self._prompt_tokens,
            looked_up_tokens=self._looked_up,
            found_tokens=self._cached,
            generated_tokens=self._generated,
        )

    def stacks(self) -> str:
        """None: the server's threads are its own."""
        return ""

    def misplaced_tensors(self) -> tuple[str, ...]:
        return ()

    def stalled_for_s(self) -> float:
        """Never: the server's own health and the silence of each answer are watched here."""
        return 0.0

    def kill(self, label: DeathLabel, reason: str) -> None:
        with suppress(RuntimeError):  # it is dead already
            self._loop.call_soon_threadsafe(self._die, Death(label, reason))

    def close(self) -> None:
        if self._begin_close():
            asked = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            wait((asked,), CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)

    # A request, on the event loop ------------------------------------------------------------

    def _begin(self, generation: ServerGeneration) -> None:
        if self._death is not None:
            generation.fail(EngineDied(self._death))
        else:
            self._tasks[generation] = self._loop.create_task(self._serve(generation))

    def _request_cancel(self, generation: ServerGeneration) -> None:
        with suppress(RuntimeError):  # the loop has ended, and all generations with it
            self._selector.hurry()
            self._loop.call_soon_threadsafe(self._cancel, generation)

    def _cancel(self, generation: ServerGeneration) -> None:
        if (task := self._tasks.get(generation)) is not None:
            generation.cancelled = True
            # A task that is cancelled before its first step would never end its generation.
            self._loop.call_soon(task.cancel)

    async def _serve(self, generation: ServerGeneration) -> None:
        deadline_s = generation.deadline_s
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            try:
                async with asyncio.timeout(left_s) as limit:
                    await self._run(generation)
                generation.finish()
            except TimeoutError:
                if not limit.expired():
                    raise
                generation.finish("deadline")
            self._finished += 1
        except asyncio.CancelledError:
            death = None if generation.cancelled else self._death
            if death is None:
                generation.stop_cancelled(Cancelled("the job was cancelled"))
            else:
                generation.fail(EngineDied(death))
        except Exception as error:
            told = as_told(error, "worker")
            if told is not error:
                logger.error("job %s failed", generation.id, exc_info=told)
            generation.fail(told)
        finally:
            self._cuts.discard(generation)
            del self._tasks[generation]

    async def _run(self, generation: ServerGeneration) -> None:
        if generation.ended_before:
            return
        async with self._isolation.enter(generation):
            generation.send()
            try:
                await self._answer(generation)
            except Refusal as refusal:
                raise await self._refused(generation, refusal) from None
            except (ServerAway, AnswerCut) as error:
                raise await self._find_out(generation, error) from None

    async def _answer(self, generation: ServerGeneration) -> None:
        request, begun = generation.request, generation.choices[0].begun.token_ids
        prompt = await _patiently(lambda: self._asking.prompt_of(request, begun), _AGAIN)
        reads = [
            asyncio.ensure_future(self._ask(generation, c, prompt)) for c in generation.choices
        ]
        try:
            await asyncio.gather(*reads)
        finally:
            for each in reads:
                each.cancel()

    async def _ask(
        self, generation: ServerGeneration, choice: ChoiceSoFar, prompt: Ids[int] | str | None
    ) -> None:
        def is_served() -> bool:
            """Whether another choice has the room for which this one waits."""
            return any(each.made and each.finish is None for each in generation.choices)

        await _patiently(
            lambda: self._read(generation, choice, prompt),
            _AGAIN,
            is_served=is_served,
            is_too_late=lambda: bool(choice.made),
        )

    async def _read(
        self, generation: ServerGeneration, choice: ChoiceSoFar, prompt: Ids[int] | str | None
    ) -> None:
        request, last_s = generation.request, 0.0
        try:
            async for piece in self._asking.read(generation, choice, prompt):
                generation.start(0 if prompt is None or isinstance(prompt, str) else len(prompt))
                self._generated += piece.tokens
                told = choice.take(piece)
                if told is not None:
                    generation.tell(told)
                    if not generation.begins_again:
                        self._isolation.clear(generation)
                    now_s = time.monotonic()
                    if last_s:
                        self._token_gaps.add(now_s - last_s)
                    last_s = now_s
                    ends_s = choice.ends_s(request, now_s)
                    self._selector.stream(choice, now_s if generation.is_read else ends_s)
        finally:
            self._selector.end(choice)
        if is_native(request, self._asking.served) and request.include_stop_str_in_output:
            generation.tell(choice.add(choice.stop_string or ""))
        if choice.counted is not None:
            if choice.index == 0:
                self._prompt_tokens += choice.counted.prompt
            self._looked_up += choice.counted.prompt
            self._cached += choice.counted.cached

    async def _refused(self, generation: ServerGeneration, refusal: Refusal) -> LlorchError:
        """What the job ends with, by the status: ``EngineDied`` hands it back.

        ==================  =====================================================================
        BUSY                the server has had no room for :data:`BUSY_S`: no job's fault
        UNREACHED           a proxy's word for a cut answer
        401, 403, 404       of the key, the model or the request: which of them, the server says
        5xx, amid answers   of the engine behind the API, if that is ill, or of the request
        others              of the request
        ==================  =====================================================================
        """
        if refusal.status in BUSY:
            return _busy(refusal)
        if refusal.status in UNREACHED:
            return await self._find_out(generation, refusal)
        if refusal.status in _GONE:
            await self._check_model()
        elif refusal.status >= 500 or not refusal.status:
            await self._check_life()
        if self._death is not None:
            return EngineDied(self._death)
        return self._asking.error_of(generation.request, refusal)

    # Its life --------------------------------------------------------------------------------

    async def _find_out(self, generation: ServerGeneration, error: Exception) -> EngineDied:
        """Whether the server has ended, or has cut this answer alone."""
        self._cuts.add(generation)
        await self._check_life()
        if self._death is None:
            # One that was started again at once answers, but all answers of the other are cut.
            await asyncio.sleep(CUT_TOGETHER_S)
            if len(self._isolation.there) > 1 and self._cuts >= self._isolation.there:
                self._die(_away("it was started again"), self._suspects())
        return EngineDied(self._death or Death("server", str(error), (generation.id,), lives=True))

    async def _check_model(self) -> None:
        """Dies if the server no longer takes the key or has the model, or has ended."""
        try:
            await probe(self._asking.connection, self._address.model)
        except ModelLoadFailed as error:
            self._die(_away(error.message))
        except (ServerAway, AnswerCut):
            await self._check_life()

    async def _check_life(self) -> None:
        """Dies if the server has ended."""
        try:
            await _patiently(self._hear, BUSY)
        except ServerAway as away:
            self._die(_away(away), self._suspects() if away.ended else ())
        except (AnswerCut, Refusal, WrongAnswer) as away:
            self._die(_away(away))

    async def _hear(self) -> None:
        """Asks the server, until it answers or has been silent for :data:`HUNG_S`."""
        connection, kind = self._asking.connection, self._asking.served.kind
        give_up_s = time.monotonic() + HUNG_S
        while True:
            try:
                if kind != "another server":
                    await check_health(connection, kind, LOOK_TIMEOUT_S)
                # One page may be a proxy's, and the other knows nothing of the engine behind it.
                await connection.ask("/v1/models", timeout_s=LOOK_TIMEOUT_S)
                return
            except AnswerCut:
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(LOOK_S)

    def _suspects(self) -> tuple[str, ...]:
        """Who may have ended the server: the one that was there alone, or those that were there
        also when it ended before."""
        hands = frozenset(each.id for each in self._isolation.there)
        return tuple(hands if len(hands) == 1 else hands & self._address.last_hands)

    def _die(self, death: Death, suspects: tuple[str, ...] = ()) -> None:
        hands = frozenset(each.id for each in self._isolation.there)
        if self._note_death(replace(death, suspects=suspects)):
            self._address.last_hands = hands
            self._end_task = self._loop.create_task(self._end())
            self._end_task.add_done_callback(lambda _: self._loop.stop())

    async def _end(self) -> None:
        """Ends all requests, and closes their connections."""
        self._look_task.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._asking.connection.close()

    async def _look(self) -> None:
        connection, kind = self._asking.connection, self._asking.served.kind
        heard_s = time.monotonic()
        while True:
            made = self._generated
            await asyncio.sleep(LOOK_S)
            self._made.append((time.monotonic(), self._generated))
            if self._generated > made:  # its tokens say that it lives
                heard_s = time.monotonic()
                continue
            try:
                await check_health(connection, kind, LOOK_TIMEOUT_S)
                heard_s = time.monotonic()
            except ServerAway as away:
                self._die(_away(away), self._suspects() if away.ended else ())
            except AnswerCut as error:
                if time.monotonic() - heard_s > HUNG_S:
                    self._die(_away(error))
            except Exception:  # without this task nobody sees that the server is away
                logger.exception("the look at the server failed")


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _patiently(
    ask: Callable[[], Awaitable[T]],
    statuses: Container[int],
    *,
    is_served: Callable[[], bool] = lambda: False,
    is_too_late: Callable[[], bool] = lambda: False,
) -> T:
    """What ``ask`` gives; it is asked again for :data:`BUSY_S` while it is refused with one of the
    ``statuses``, and as long as the job ``is_served``. Raises what ``ask`` does."""
    give_up_s = time.monotonic() + BUSY_S
    pause_s, longest_s = BUSY_PAUSES_S
    while True:
        try:
            return await ask()
        except Refusal as refusal:
            if refusal.status not in statuses or is_too_late():
                raise
            if is_served():
                give_up_s = time.monotonic() + BUSY_S
            elif time.monotonic() + pause_s > give_up_s:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _with_next(slots: int | None) -> int:
    """With some more that wait at the server, whose slots would else be idle while a result is
    stored and the next job is claimed."""
    return slots + -(-slots // SLOTS_A_WAITING) if slots else 0


def _away(reason: object) -> Death:
    return Death("server", f"the server is away: {reason}")


def _busy(refusal: Refusal) -> EngineDied:
    return EngineDied(Death("server", f"the server is busy: {refusal}", lives=True))
