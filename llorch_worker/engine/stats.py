"""Counts what the engine's steps do."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from llorch_worker.engine.step_plan import StepPlan

RATE_WINDOW_S = 5


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
