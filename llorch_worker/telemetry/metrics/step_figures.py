"""What the engine's steps did, counted on its thread."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from llorch_worker.telemetry.metrics.buckets import STEP_TOKENS, TOKEN_GAP_S
from llorch_worker.telemetry.metrics.tally import Tally

if TYPE_CHECKING:
    from llorch_worker.engine.sequence import Sequence
    from llorch_worker.engine.step_plan import StepPlan


class StepFigures:
    """A ``StepObserver``. The engine's thread adds, any thread reads.

    Nearly every sequence got its last token from the previous step. They share one gap, which is
    counted once for all of them.
    """

    def __init__(self) -> None:
        self.step_tokens = Tally(STEP_TOKENS)
        """Tokens that each step computed, of prompts and of texts."""
        self.token_gaps = Tally(TOKEN_GAP_S)
        """Seconds between a sequence's token and the one before it, in this worker."""
        self.prompt_tokens = 0
        self.looked_up_tokens = 0
        """Tokens of prompts that were looked for in the KV cache: those of every choice."""
        self.found_tokens = 0
        self.generated_tokens = 0
        self._step_s = 0.0

    def step(self, plan: StepPlan, sequences: Items[Sequence], now_s: float) -> None:
        self.step_tokens.add(sum([chunk.rows for chunk in plan.chunks]))
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
                self.token_gaps.add(now_s - token_s)
        if together:
            self.token_gaps.add(now_s - last_s, together)
        self.generated_tokens += len(sequences)

    def more(self, tokens: int) -> None:
        self.token_gaps.add(0.0, tokens)
        self.generated_tokens += tokens

    def prefilled(self, sequence: Sequence) -> None:
        self.looked_up_tokens += sequence.prompt_length
        self.found_tokens += sequence.cached_tokens
        if sequence.choice == 0:
            self.prompt_tokens += sequence.prompt_length
