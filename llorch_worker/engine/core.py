"""The engine without its thread: generations in, one step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Final

import torch

from llorch_worker.contract import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LlorchError,
    OutOfMemory,
)
from llorch_worker.engine.device.step_errors import is_device_lost, is_out_of_memory
from llorch_worker.engine.device.thread_count import ThreadCount
from llorch_worker.engine.draft_logits import DraftLogits
from llorch_worker.engine.generation import Generation, LogprobEntries
from llorch_worker.engine.prompt_logprobs import ScoredTokens
from llorch_worker.engine.runner import Runner, Step
from llorch_worker.engine.sampling.sampler import Sampled
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import PRIORITY_RANKS, Sequence, SequenceState
from llorch_worker.engine.stats import Counters
from llorch_worker.engine.step_plan import StepPlan
from llorch_worker.processes.board import Board

logger = logging.getLogger(__name__)

# Python 3.11 looks up a member of an enumeration by a function, which each row would call.
_FINISHED: Final = SequenceState.FINISHED


class EngineCore:
    """Generations and their sequences, step by step. Not thread-safe: one thread owns it.

    On a device that works beside the host, a step is launched before the tokens of the previous one
    are read, if the scheduler can plan it without them. If a grammar has to see these tokens before
    it can say what may follow, only sampling waits for them.

    At most two launched steps are undelivered, and at most one between two calls. The results are
    the same as if each step had waited for the previous one: tokens are delivered in order, and
    tokens for a sequence that has ended are discarded.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        counters: Counters,
        token_text: Callable[[int], tuple[str, tuple[int, ...] | None]],
        thread_count: ThreadCount | None = None,
        *,
        board: Board,
    ) -> None:
        """``token_text``: see :meth:`.Tokenizer.text_and_bytes`. ``board`` gets the handles of the
        generations in launched steps."""
        self.scheduler = scheduler
        self._runner = runner
        self._counters = counters
        self._threads = thread_count
        self._ahead: Step | None = None
        """The step that was launched before the tokens of the one before it were read."""
        self._board = board
        self._entries = LogprobEntries(token_text)
        self._prefilled = False
        """Whether the last step computed a part of a prompt: the next may go on with it."""
        self._launched: list[Sequence] = []
        """Those of the last launched steps, whose handles the board has."""
        self._generations: dict[Sequence, Generation] = {}
        self._with_deadline: set[Generation] = set()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._ahead is not None

    @property
    def prefills_next(self) -> bool:
        """Whether the next step may compute a prompt, or a part of one."""
        ahead = self._ahead is not None and bool(self._ahead.plan.prefills)
        return self._prefilled or bool(self.scheduler.waiting) or ahead

    def add(self, generation: Generation) -> None:
        """Queues a generation that is known to fit; a complete one ends here."""
        for sequence in generation.sequences:
            self._generations[sequence] = generation
        if generation.complete:
            now_s = time.monotonic()
            generation.start(None, now_s)
            self._finish_if_complete(generation, now_s)
            return
        for sequence in generation.sequences:
            if sequence.state is not _FINISHED:
                self.scheduler.add(sequence)
        if generation.deadline_s is not None:
            self._with_deadline.add(generation)

    def cancel(self, generation: Generation, reason: str = "the job was cancelled") -> None:
        """Ends a generation and frees its blocks at once. Does nothing if it is done."""
        if not generation.done:
            self._free(generation)
            # Blocks must be free before the event is sent.
            self._settle()
            generation.stop_cancelled(Cancelled(reason))
            self._forget(generation)

    def cancel_all(self, reason: str) -> None:
        for generation in self._active():
            self.cancel(generation, reason)
        self._settle()

    def fail_all(self, error: LlorchError) -> None:
        """Ends every generation with ``error``. It touches no blocks, so it works after a crash."""
        for generation in self._active():
            if not generation.done:
                generation.fail(error)
        self._generations.clear()

    def check_integrity(self) -> None:
        """Raises unless every KV block is free or held by the sequences that list it."""
        self.scheduler.check_integrity()

    def step(self) -> StepPlan:
        """Applies deadlines, then computes one step and delivers its tokens.

        The next step is launched before the tokens are read, if possible.
        """
        begun_s = time.monotonic()
        self._apply_deadlines(begun_s)
        step = self._take_ahead()
        if step is None:
            plan = self.scheduler.schedule()
            if not plan.chunks:
                return plan
            self._start(plan)
            self._note_launched(plan)
            step = self._launch(plan)
        self._launch_ahead(step)
        self._deliver_step(step)
        self._prefilled = bool(step.plan.prefills)
        if not self._prefilled:
            self._note_time(step.plan, time.monotonic() - begun_s)
        if not self.has_work:
            self._runner.forget()
        return step.plan

    def _start(self, plan: StepPlan) -> None:
        now_s = time.monotonic()
        for chunk in plan.prefills:
            self._generations[chunk.sequence].start(chunk.sequence, now_s)

    def _launch(self, plan: StepPlan, after: Step | None = None) -> Step:
        threads = self._threads
        try:
            # A prefill has work for all.
            apart = nullcontext() if threads is None or not plan.prefills else threads.all_threads()
            with apart:
                return self._runner.launch(plan, after)
        except Exception as error:
            logger.debug("a step could not be launched", exc_info=True)
            return Step(plan, error)

    def _launch_ahead(self, step: Step) -> None:
        """Launches the step after ``step``, if that is possible before ``step`` is read."""
        if isinstance(step.pending, Exception) or not self._runner.overlaps:
            return
        if (plan := self.scheduler.schedule_ahead(step.plan)) is not None:
            self._note_launched(step.plan, plan)
            self._ahead = self._launch(plan, step)
            self._start(plan)

    def _take_ahead(self) -> Step | None:
        """The step that was launched ahead, to deliver it. Starts sampling, if that waited for the
        tokens before it."""
        step, self._ahead = self._ahead, None
        if step is not None:
            try:
                self._runner.sample(step)
            except Exception as error:
                logger.debug("sampling could not be launched", exc_info=True)
                step.pending = error
        return step

    def _drop_ahead(self) -> None:
        """Waits for the step after one that failed, and discards its tokens."""
        step, self._ahead = self._ahead, None
        if step is None:
            return
        try:
            step.read()
        except Exception:
            logger.debug("the step after a failed step failed too", exc_info=True)
        self.scheduler.drop(step.plan)

    def _note_time(self, plan: StepPlan, seconds: float) -> None:
        """A step without a prefill has taken so long, with sampling and delivery: these take time
        for each token too."""
        if (planner := self.scheduler.planner) is not None:
            planner.costs.note(plan.rows, seconds)
        if self._threads is not None:
            self._threads.note(plan.rows, seconds)

    def _deliver_step(self, step: Step) -> None:
        """Waits for a step and delivers its tokens."""
        plan = step.plan
        try:
            sampled, scored = step.read(), step.scored()
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(plan.chunks))
            self._drop_ahead()
            self.scheduler.drop(plan)
            self._survive(plan, error)
            return
        self.scheduler.advance(plan)
        rows = [
            (row, sequence)
            for row, (sequence, position) in enumerate(
                zip(step.sequences, step.positions, strict=True)
            )
            # Not if it has ended with the step before, or a grammar has forced this token since.
            if len(sequence.token_ids) - sequence.prompt_length == position
            and sequence.state is not _FINISHED
        ]
        going = [sequence for _, sequence in rows]
        now_s = time.monotonic()
        self._counters.count_step(plan, going, now_s)
        for sequence, tokens in scored:
            if sequence.state is not _FINISHED:
                self._take_scored(sequence, tokens, now_s)
        self._deliver(rows, sampled, step.drafts, now_s)

    @property
    def first_class(self) -> int:
        """The rank of the most urgent class that something which runs or waits asks for."""
        scheduler = self.scheduler
        sequences = chain(scheduler.running, scheduler.waiting)
        ranks = (PRIORITY_RANKS[sequence.request.priority] for sequence in sequences)
        return min(ranks, default=PRIORITY_RANKS["low"])

    def settle(self) -> None:
        """Delivers the step that was launched ahead, so that another core may have the device and
        the board."""
        self._settle()
        self._launched = []

    def _settle(self) -> None:
        """Delivers the step that was launched ahead, so that the device is idle."""
        if (step := self._take_ahead()) is not None:
            self._deliver_step(step)

    def _deliver(
        self,
        rows: list[tuple[int, Sequence]],
        sampled: Sampled,
        drafts: DraftLogits | None,
        now_s: float,
    ) -> None:
        while True:
            going = [
                sequence
                for row, sequence in rows
                if self._deliver_row(sequence, sampled, row, drafts, now_s)
            ]
            # Another choice of a generation may have failed meanwhile.
            going = [s for s in going if s.state is not _FINISHED]
            if drafts is None or not going:
                return
            try:
                rows, sampled = list(enumerate(going)), drafts.sample(going)
            except Exception as error:
                if is_device_lost(error):
                    raise
                # What is not sampled here, the next step samples.
                logger.exception("the drafts of %d sequences were not checked", len(going))
                self._runner.forget()
                for sequence in going:
                    self._generations[sequence].tell(sequence, now_s)
                return
            for sequence in going:
                self.scheduler.accept(sequence, 1)
            self._counters.count_more(len(going))

    def _deliver_row(
        self,
        sequence: Sequence,
        sampled: Sampled,
        row: int,
        drafts: DraftLogits | None,
        now_s: float,
    ) -> bool:
        """Whether the step has computed the sequence's next token too, because a draft held."""
        if sequence.state is _FINISHED:
            # Another choice of its generation has failed in this step.
            return False
        generation = self._generations[sequence]
        if row in sampled.damaged:
            generation.tell(sequence, now_s)
            self._fail_damaged(sequence)
            return False
        try:
            taken = self._take_token(sequence, sampled, row)
            if drafts is not None:
                held, goes_on = drafts.take(sequence, taken)
                sequence.accepted_drafts += held
                self._counters.accepted_draft_tokens_total += held
                if sequence.finish_reason is None:
                    # If the next token cannot be sampled here, a step computes the last one again.
                    self.scheduler.accept(sequence, held - goes_on)
                    if goes_on:
                        return True
            generation.tell(sequence, now_s)
            if sequence.finish_reason is not None:
                self._finish_if_complete(generation, now_s)
        except InvalidRequest as error:
            generation.tell(sequence, now_s)
            self._fail(generation, error)
        except Exception:
            # A defect in one job's text must not affect the other jobs.
            logger.exception("job %s failed while its token was delivered", generation.id)
            self._fail(generation, InternalError("the engine could not deliver a token"))
        return False

    def _take_scored(self, sequence: Sequence, scored: ScoredTokens, now_s: float) -> None:
        """Takes the log probabilities of the next tokens of a prompt."""
        if scored.damaged:
            self._fail_damaged(sequence)
            return
        assert sequence.prompt_logprobs is not None
        sequence.prompt_logprobs.take(scored)
        if sequence.ended:
            if not sequence.generated_count:
                self._counters.steps.prefilled(sequence)
            self.scheduler.finish(sequence)
            if sequence.finish_reason is None:
                sequence.close("length")
            self._finish_if_complete(self._generations[sequence], now_s)

    def _take_token(self, sequence: Sequence, sampled: Sampled, row: int) -> tuple[int, ...]:
        """The tokens that ``sequence`` gets: the sampled one, and those that it forces."""
        token_id = sampled.token_ids[row]
        sequence.append(token_id)
        if sequence.logprobs is not None:
            sequence.logprobs.append(self._entries.of_token(token_id, sampled.logprobs[row]))
        forced: tuple[int, ...] = ()
        if sequence.constrained:
            forced = sequence.append_forced()
            self._counters.count_more(len(forced))
        if sequence.finish_reason is not None:
            # Before the event, so that the blocks are free when it is sent, or after this step.
            self.scheduler.finish(sequence)
        return (token_id, *forced)

    def _apply_deadlines(self, now_s: float) -> None:
        due = [g for g in self._with_deadline if not g.done and _deadline_s(g) <= now_s]
        for generation in sorted(due, key=_deadline_s):
            if generation.done:
                continue  # it ended in the step ahead, which an earlier deadline delivered
            for sequence in generation.sequences:
                self.scheduler.finish(sequence)
                if sequence.finish_reason is None:
                    sequence.close("deadline")
            self._settle()
            try:
                self._finish_if_complete(generation, now_s)
            except Exception:
                logger.exception("job %s failed at its deadline", generation.id)
                self._fail(generation, InternalError("the engine could not end the job"))

    def _finish_if_complete(self, generation: Generation, now_s: float) -> None:
        if generation.complete:
            self._counters.finished_total += 1
            scored = generation.prompt_logprobs
            entries = None if scored is None else partial(self._entries.of_prompt, scored)
            generation.finish(now_s, entries)
            self._forget(generation)

    def _survive(self, plan: StepPlan, error: Exception) -> None:
        """Keeps the jobs that can continue after a failed step, which computed nothing.

        Raises ``error`` again if the device is lost.
        """
        if is_device_lost(error):
            logger.critical("the device is lost: %s", str(error).partition("\n")[0])
            raise error
        self._runner.forget()
        chunks = [c for c in plan.chunks if c.sequence.state is not _FINISHED]
        if not is_out_of_memory(error):
            failure: LlorchError = InternalError(f"the engine step failed: {type(error).__name__}")
            for chunk in chunks:
                # A generation fails with its first choice.
                if (generation := self._generations.get(chunk.sequence)) is not None:
                    self._fail(generation, failure)
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        planner = self.scheduler.planner
        if planner is not None and any(chunk.drafts for chunk in chunks):
            # The same batch may fit without them.
            logger.warning("out of memory in a step with drafts; there are none for a while")
            planner.pause()
            return
        if len(chunks) < len(plan.chunks):
            return  # Some sequences have ended since: the next step is smaller anyway.
        largest = max(chunks, key=lambda chunk: (chunk.count, chunk.start)).sequence
        if len(chunks) > 1:
            logger.warning("out of memory with %d sequences; one waits", len(plan.chunks))
            self.scheduler.relieve(largest)
            return
        tokens = len(largest.token_ids)
        failure = OutOfMemory(f"the device has no memory for a sequence of {tokens} tokens")
        self._fail(self._generations[largest], failure)

    def _fail(self, generation: Generation, error: LlorchError) -> None:
        if not generation.done:
            self._free(generation)
            generation.fail(error)
            self._forget(generation)

    def _fail_damaged(self, sequence: Sequence) -> None:
        self.scheduler.blocks.distrust(sequence)
        error = InternalError("the model's logits are not finite")
        self._fail(self._generations[sequence], error)

    def _free(self, generation: Generation) -> None:
        for sequence in generation.sequences:
            self.scheduler.finish(sequence)

    def _forget(self, generation: Generation) -> None:
        # Call this last: a crash before the terminal event must still find the generation.
        self._with_deadline.discard(generation)
        for sequence in generation.sequences:
            if self._generations.pop(sequence, None) and sequence.drafter is not None:
                sequence.drafter.end(sequence.generated_ids)

    def _note_launched(self, *plans: StepPlan) -> None:
        """Tells the board whose steps are not delivered, before the last of them is launched."""
        launched = [chunk.sequence for plan in plans for chunk in plan.chunks]
        if launched != self._launched:
            self._launched = launched
            # Of a sequence that has ended since, the step ahead of its end may compute a token
            # more.
            found = map(self._generations.get, launched)
            self._board.launch(dict.fromkeys(each.handle for each in found if each))

    def _active(self) -> tuple[Generation, ...]:
        return tuple(dict.fromkeys(self._generations.values()))


def _deadline_s(generation: Generation) -> float:
    return math.inf if generation.deadline_s is None else generation.deadline_s
