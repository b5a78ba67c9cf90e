"""The engine's figures."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from llorch_worker.engine.step_plan import StepPlan

RATE_WINDOW_S = 5


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine; totals count from its start.

    ``bytes``: memory held, by part: weights, kv, rope, masks. ``planned_bytes``: the plan by part,
    including the ``workspace`` of steps. ``measured_bytes``: what was measured, empty before
    :meth:`Engine.warm_up`; on a card with ``workspace``, the peak of the steps, and
    ``reserved``, what torch's allocator holds beyond that.

    ``tokens_per_s``: generated tokens of all sequences over the last 5 s. ``kv_blocks_kept``: free
    blocks whose contents later prompts may find. ``prefix_hits_total``: prefills that found their
    beginning. ``cached_tokens_total``: tokens that did not have to be computed, including those of
    preempted sequences and resumed jobs. ``drafts_total`` counts the guesses of one or more
    tokens that a step checked, ``draft_tokens_total`` their tokens, and
    ``accepted_draft_tokens_total`` those that became tokens of a text.
    """

    model: str
    device: str
    dtype: str
    bytes: dict[str, int]
    planned_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    max_context: int
    max_sequences: int
    running: int
    waiting: int
    tokens_per_s: float
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_kept: int
    prompt_tokens_total: int
    cached_tokens_total: int
    prefix_hits_total: int
    completion_tokens_total: int
    finished_total: int
    preempted_total: int
    steps_total: int
    drafts_total: int
    draft_tokens_total: int
    accepted_draft_tokens_total: int


@dataclass(slots=True)
class Counters:
    """Totals that the engine thread counts up and any thread reads."""

    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    finished_total: int = 0
    steps_total: int = 0
    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0
    _seconds: deque[tuple[int, int]] = field(default_factory=deque)

    def count_step(self, plan: StepPlan, tokens: int) -> None:
        """``tokens`` were generated. Prompt tokens count each time they are computed: preemption
        repeats them."""
        self.steps_total += 1
        self.completion_tokens_total += tokens
        for chunk in plan.chunks:
            self.drafts_total += bool(chunk.drafts)
            self.draft_tokens_total += len(chunk.drafts)
            prompt_left = chunk.sequence.prompt_length - chunk.start
            if prompt_left > 0:
                self.prompt_tokens_total += min(chunk.count, prompt_left)
        second = int(time.monotonic())
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = (second, self._seconds[-1][1] + tokens)
            return
        self._seconds.append((second, tokens))
        while self._seconds[0][0] < second - RATE_WINDOW_S:
            self._seconds.popleft()

    def count_more(self, tokens: int) -> None:
        """``tokens`` more than one for each sequence of the step were generated."""
        if tokens:
            self.completion_tokens_total += tokens
            second, counted = self._seconds[-1]
            self._seconds[-1] = (second, counted + tokens)

    def tokens_per_s(self) -> float:
        """Generated tokens per second over the last seconds, the current one included."""
        now = time.monotonic()
        recent = [(s, n) for s, n in tuple(self._seconds) if s > now - RATE_WINDOW_S]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(1.0, now - recent[0][0])
