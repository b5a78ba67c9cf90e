"""One step at a time over the texts of all running jobs that read texts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llorch_worker.contract import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    LlorchError,
    OutOfMemory,
)
from llorch_worker.engine.device.step_errors import (
    MEMORY_PAUSE_S,
    is_device_lost,
    is_out_of_memory,
)
from llorch_worker.engine.sequence import HIGH_RANK, PRIORITY_RANKS
from llorch_worker.engine.stats import Counters, TokenRate
from llorch_worker.engine.texts_generation import TextsGeneration
from llorch_worker.model.encoder import Texts
from llorch_worker.processes.board import Board

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextsStep:
    """The texts of a step: of each job, how many of those that are its next."""

    chunks: Sequence[tuple[TextsGeneration, int]]


class TextsCore:
    """The jobs that read texts and their steps. The engine's thread alone calls it."""

    def __init__(
        self,
        compute: Callable[[Texts], torch.Tensor],
        step_tokens: int,
        *,
        counters: Counters,
        low_waits_at_most_s: float,
        board: Board,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``compute``: what each text gives, float32 ``[texts, width]``. ``low_waits_at_most_s``: a
        job that has waited so long in all, by ``clock``, is as urgent as a high one from then on.
        """
        self._compute = compute
        self._step_tokens = self._most_step_tokens = step_tokens
        self._counters = counters
        self._low_waits_at_most_s = low_waits_at_most_s
        self._board = board
        self._clock = clock
        self._grows_at_s = 0.0
        self._jobs: list[TextsGeneration] = []
        """Those that are not done, in the order in which they are taken."""
        self.rate = TokenRate()

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    prefills_next = True
    """Each step takes long."""

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def first_class(self) -> int:
        """The rank of the most urgent class that a job asks for; one that has waited long only
        ranks as high."""
        return min(PRIORITY_RANKS[job.request.priority] for job in self._jobs)

    def is_urgent(self, now_s: float) -> bool:
        """Whether a job is of a class above low, or has waited as long as low may."""
        self._age(now_s)
        return any(job.rank < PRIORITY_RANKS["low"] for job in self._jobs)

    def add(self, job: TextsGeneration) -> None:
        """A job whose texts are all in its journal ends here."""
        if job.left:
            job.waits_since_s = self._clock()
            self._jobs.append(job)
        else:
            self._finish(job)

    def cancel(self, job: TextsGeneration, reason: str = "the job was cancelled") -> None:
        """Ends a job. Does nothing if it is done."""
        if not job.done:
            self._forget(job)
            job.stop_cancelled(Cancelled(reason))

    def cancel_all(self, reason: str) -> None:
        for job in [*self._jobs]:
            self.cancel(job, reason)

    def fail_all(self, error: LlorchError) -> None:
        for job in [*self._jobs]:
            self._fail(job, error)

    def check_integrity(self) -> None:
        """Nothing outlives a step."""

    def warm_up(self, longest: int) -> None:
        """Computes a step of texts with so many tokens each."""
        count = max(1, self._step_tokens // longest)
        self._compute(Texts(torch.zeros(longest * count, dtype=torch.int64), [longest] * count))

    def step(self) -> TextsStep:
        """Computes the next texts, those of equal length side by side."""
        now_s = time.monotonic()
        self._age(self._clock())
        for job in [*self._jobs]:
            if job.deadline_s is not None and job.deadline_s <= now_s:
                self._fail(job, DeadlineExceeded("the deadline passed before all texts had ended"))
        step = TextsStep([*self._take()])
        if not step.chunks:
            return step
        self._board.launch(job.handle for job, _ in step.chunks)
        for job, _ in step.chunks:
            job.waited_s += self._clock() - job.waits_since_s
            job.start(now_s)
        try:
            rows = self._rows(step)
        except Exception as error:  # noqa: BLE001 - the jobs of the step are told
            self._survive(step, error)
        else:
            self._deliver(step, rows)
        self._board.launch(())
        for job, _ in step.chunks:
            job.waits_since_s = self._clock()
        return step

    def _age(self, now_s: float) -> None:
        if self._step_tokens < self._most_step_tokens and now_s >= self._grows_at_s:
            # What took the memory may be gone.
            self._step_tokens = min(2 * self._step_tokens, self._most_step_tokens)
            self._grows_at_s = now_s + MEMORY_PAUSE_S
        for job in self._jobs:
            if job.waited_s + now_s - job.waits_since_s >= self._low_waits_at_most_s:
                job.rank = HIGH_RANK

    def _take(self) -> Iterator[tuple[TextsGeneration, int]]:
        """The jobs of the next step, the most urgent alone, and how many texts of each: one of each
        in turn, so that a short job never waits for a long one."""
        if not self._jobs:
            return
        first = min(job.rank for job in self._jobs)
        equals = [job for job in self._jobs if job.rank == first]
        # If one ends the engine again, no other was in its hands.
        equals = [job for job in self._jobs if job.suspect and not job.computed][:1] or equals
        counts = dict.fromkeys(equals, 0)
        tokens, going = 0, equals
        while going:
            for job in going:
                length = len(job.prepared.token_ids[job.computed + counts[job]])
                # The first always goes: a text may be longer than a step.
                if tokens and tokens + length > self._step_tokens:
                    going = []
                    break
                tokens += length
                counts[job] += 1
            going = [job for job in going if counts[job] < job.left]
        taken = [job for job in equals if counts[job]]
        # Who got fewest of this step is first in the next.
        last = next((at for at, job in enumerate(equals) if counts[job] < counts[equals[0]]), 0)
        order = [*equals[last:], *equals[:last]]
        self._jobs = [*(job for job in self._jobs if job not in counts), *order]
        for job in taken:
            yield job, counts[job]

    def _rows(self, step: TextsStep) -> torch.Tensor:
        """What the texts of a step give, in its order: float32 ``[texts, width]``."""
        places = [(job, job.computed + at) for job, count in step.chunks for at in range(count)]
        lengths = torch.tensor([len(job.prepared.token_ids[at]) for job, at in places])
        order = lengths.argsort(stable=True)
        sorted_places = [places[at] for at in order.tolist()]
        ids = torch.cat(
            [torch.as_tensor(job.prepared.token_ids[at]).long() for job, at in sorted_places]
        )
        types = None
        if any(job.prepared.seconds for job, _ in step.chunks):
            types = torch.cat([_types(job, at) for job, at in sorted_places])
        computed = self._compute(Texts(ids, lengths[order].tolist(), types)).cpu()
        self._counters.count_texts(len(ids))
        self.rate.step(len(ids))
        rows = torch.empty_like(computed)
        rows[order] = computed
        return rows

    def _deliver(self, step: TextsStep, rows: torch.Tensor) -> None:
        now_s, at = time.monotonic(), 0
        for job, count in step.chunks:
            of_job = rows[at : at + count]
            at += count
            if job.done:
                continue  # an event's callback failed
            if not of_job.isfinite().all():
                self._fail(job, InternalError("the model's numbers are not finite"))
                continue
            if len(of_job) == job.left:
                self._forget(job)
                self._counters.finished_total += 1
            job.take(of_job, now_s)

    def _finish(self, job: TextsGeneration) -> None:
        self._counters.finished_total += 1
        job.finish(time.monotonic())

    def _survive(self, step: TextsStep, error: Exception) -> None:
        """Keeps the jobs that can go on after a step that failed. Raises ``error`` again if the
        device is lost."""
        if is_device_lost(error):
            logger.critical("the device is lost: %s", str(error).partition("\n")[0])
            raise error
        logger.exception("a step of %d jobs failed", len(step.chunks))
        tokens = sum(
            len(job.prepared.token_ids[job.computed + at])
            for job, count in step.chunks
            for at in range(count)
        )
        texts = sum(count for _, count in step.chunks)
        if is_out_of_memory(error) and texts > 1:
            self._step_tokens = max(1, tokens // 2)
            self._grows_at_s = self._clock() + MEMORY_PAUSE_S
            logger.warning("out of memory; steps have at most %d tokens now", self._step_tokens)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return
        failure: LlorchError = InternalError(f"the engine step failed: {type(error).__name__}")
        if is_out_of_memory(error):
            failure = OutOfMemory(f"the device has no memory for a text of {tokens} tokens")
        for job, _ in step.chunks:
            self._fail(job, failure)

    def _fail(self, job: TextsGeneration, error: LlorchError) -> None:
        if not job.done:
            self._forget(job)
            job.fail(error)

    def _forget(self, job: TextsGeneration) -> None:
        if job in self._jobs:
            self._jobs.remove(job)


def _types(job: TextsGeneration, at: int) -> torch.Tensor:
    """0 for the tokens of the first text, 1 for those of the second: int64 ``[tokens]``."""
    length, seconds = len(job.prepared.token_ids[at]), job.prepared.seconds
    types = torch.zeros(length, dtype=torch.int64)
    if seconds:
        types[seconds[at] :] = 1
    return types
