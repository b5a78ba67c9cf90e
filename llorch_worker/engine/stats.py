"""Counts what the engine's steps do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from llorch_worker.engine.interface import STEP_TOKENS, TOKEN_GAP_S, StepFigures, TallyCounts
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import StepPlan

RATE_WINDOW_S = 5


class TokenRate:
    """Tokens per second over the last seconds. The engine's thread adds, any thread reads."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()

    def step(self, tokens: int) -> None:
        """A step has made ``tokens``."""
        second = int(time.monotonic())
        if self._seconds and self._seconds[-1][0] == second:
            self.more(tokens)
            return
        self._seconds.append((second, tokens))
        while self._seconds[0][0] < second - RATE_WINDOW_S:
            self._seconds.popleft()

    def more(self, tokens: int) -> None:
        """The last step has made so many more."""
        second, counted = self._seconds[-1]
        self._seconds[-1] = (second, counted + tokens)

    def read(self) -> float:
        """The current second included."""
        now = time.monotonic()
        recent = [(s, n) for s, n in tuple(self._seconds) if s > now - RATE_WINDOW_S]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(1.0, now - recent[0][0])


class StepCounts:
    """Counts up what :class:`.StepFigures` tells. The engine's thread adds, any thread reads.

    Nearly every sequence got its last token from the previous step. They share one gap, which is
    counted once for all of them.
    """

    def __init__(self) -> None:
        self._step_tokens = TallyCounts(STEP_TOKENS)
        self._token_gaps = TallyCounts(TOKEN_GAP_S)
        self._prompt_tokens = 0
        self._looked_up_tokens = 0
        self._found_tokens = 0
        self._generated_tokens = 0
        self._step_s = 0.0

    def step(self, plan: StepPlan, sequences: Items[Sequence], now_s: float) -> None:
        """A step was computed, and each of ``sequences`` has a new token at ``now_s``, monotonic
        seconds."""
        self._step_tokens.add(plan.rows)
        last_s, self._step_s = self._step_s, now_s
        together = 0
        for sequence in sequences:
            token_s = sequence.token_s
            sequence.token_s = now_s
            if token_s == last_s:
                together += 1
            elif token_s is None:
                self.prefilled(sequence)
            else:
                self._token_gaps.add(now_s - token_s)
        if together:
            self._token_gaps.add(now_s - last_s, together)
        self._generated_tokens += len(sequences)

    def more(self, tokens: int) -> None:
        """A text got ``tokens`` more in this step: a grammar forced them, or drafts held."""
        self._token_gaps.add(0.0, tokens)
        self._generated_tokens += tokens

    def read_texts(self, tokens: int) -> None:
        """A step has read texts of so many ``tokens``."""
        self._step_tokens.add(tokens)
        self._prompt_tokens += tokens

    def prefilled(self, sequence: Sequence) -> None:
        """The prompt of a sequence was computed."""
        self._looked_up_tokens += sequence.prompt_length
        self._found_tokens += sequence.cached_tokens
        if sequence.choice == 0:
            self._prompt_tokens += sequence.prompt_length

    def read(self) -> StepFigures:
        return StepFigures(
            step_tokens=self._step_tokens.read(),
            token_gaps=self._token_gaps.read(),
            prompt_tokens=self._prompt_tokens,
            looked_up_tokens=self._looked_up_tokens,
            found_tokens=self._found_tokens,
            generated_tokens=self._generated_tokens,
        )


@dataclass(slots=True)
class Counters:
    """What the engine thread counts up and any thread reads."""

    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    finished_total: int = 0
    steps_total: int = 0
    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0
    rate: TokenRate = field(default_factory=TokenRate)
    """Of generated tokens."""
    steps: StepCounts = field(default_factory=StepCounts)

    def count_step(self, plan: StepPlan, sequences: Items[Sequence], now_s: float) -> None:
        """See :meth:`StepCounts.step`. Prompt tokens count each time they are computed: preemption
        repeats them."""
        self.steps.step(plan, sequences, now_s)
        self.steps_total += 1
        self.completion_tokens_total += len(sequences)
        if plan.has_drafts:
            drafts = [len(chunk.drafts) for chunk in plan.chunks if chunk.drafts]
            self.drafts_total += len(drafts)
            self.draft_tokens_total += sum(drafts)
        prompt = [c for c in plan.chunks if c.start < c.sequence.prompt_length]
        self.prompt_tokens_total += sum(
            [min(c.count, c.sequence.prompt_length - c.start) for c in prompt]
        )
        self.rate.step(len(sequences))

    def count_more(self, tokens: int) -> None:
        """``tokens`` more than one for each sequence of the step were generated."""
        if tokens:
            self.completion_tokens_total += tokens
            self.rate.more(tokens)
            self.steps.more(tokens)

    def count_texts(self, tokens: int) -> None:
        """A step has read texts of so many ``tokens``."""
        self.steps.read_texts(tokens)
        self.steps_total += 1
        self.prompt_tokens_total += tokens
