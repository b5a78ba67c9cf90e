"""Which drafts of each sequence a step shall have."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from heapq import heapify, heapreplace
from math import exp, log1p
from typing import Final

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.device.warm_up import measure_steps
from llorch_worker.engine.draft_model import DraftModel
from llorch_worker.engine.drafting.drafter import Draft
from llorch_worker.engine.drafting.step_costs import StepCosts
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk
from llorch_worker.model import ForwardModel

LEAST_GAIN: Final = 1.05
"""Drafts must promise this many times the speed without, because both sides are estimates."""
LEAST_GAIN_BY_MODEL: Final = 1.3
"""And so many times those of a draft model, whose gain is small enough that what the estimates lack
decides: the warm-up does not measure how long it takes to sample each draft."""
MOST_DRAFTS: Final = 15
"""Drafts of one sequence in a step."""
SPREAD_TOKENS: Final = 256
"""Over how many tokens at most a draft model's first pass over a prompt is spread, when it is
weighed against what the drafts gain. A job that may generate fewer has fewer to pay for it."""


class DraftPlanner:
    """Chooses the drafts with which a step promises the highest speed of its sequences.

    That is the geometric mean of their tokens per second: drafts lengthen the step for all, so what
    some sequences gain counts against what the others lose. The sum would let one sequence that
    repeats a text slow down many that do not.
    """

    def __init__(self, most_rows: int, model: DraftModel | None = None) -> None:
        """A step has at most ``most_rows`` drafts. ``model`` computes those of its drafters."""
        self.most_rows = most_rows
        self.model = model
        self.costs = StepCosts()
        self._spent_s = 0.0

    def measure(self, model: ForwardModel, cache: UnifiedCache, rows: int) -> None:
        """Measures steps of ``model`` with up to so many rows, and passes of the draft model.

        See :func:`measure_steps`.
        """
        self.costs = StepCosts(measure_steps(model, cache, rows))
        if (drafts := self.model) is not None:
            drafts.costs = StepCosts(measure_steps(drafts.model, drafts.cache, rows))

    def drafting_s(self) -> float:
        """Seconds that the draft model has taken since the last call."""
        before = self._spent_s
        self._spent_s = before if self.model is None else self.model.spent_s
        return self._spent_s - before

    def stop(self) -> None:
        """No step has drafts from now on: they failed, or there is no memory for them."""
        self.most_rows = 0

    def pays(self, chunks: Items[Chunk]) -> bool:
        """Whether some of these decodes shall have drafts."""
        return any(self._proposals(chunks, self.most_rows)[1])

    def with_drafts(
        self, chunks: list[Chunk], budget: int, allocate: Callable[[Sequence, int], bool]
    ) -> list[Chunk]:
        """These decodes with the drafts that pay, ``budget`` of them at most.

        ``allocate`` gives a sequence blocks for so many tokens, or says that there are none.
        """
        drafts: dict[Sequence, list[int]] = {}
        wanted = []
        proposals, lengths = self._proposals(chunks, budget)
        for chunk, draft, length in zip(chunks, proposals, lengths, strict=True):
            tokens = len(chunk.sequence.token_ids) + length
            if draft and length and allocate(chunk.sequence, tokens):
                drafts[chunk.sequence] = draft.token_ids[:length]
                if draft.behind:
                    wanted.append((chunk.sequence, length))
        if wanted and self.model is not None:
            guessed = self.model.guess(wanted)
            if guessed is None:
                self.stop()
            drafts.update((sequence, (guessed or {}).get(sequence, [])) for sequence, _ in wanted)
        return [replace(chunk, drafts=tuple(drafts.get(chunk.sequence, ()))) for chunk in chunks]

    def _proposals(self, chunks: Items[Chunk], most: int) -> tuple[list[Draft | None], list[int]]:
        """What may follow each decode, and how many tokens of it pay, ``most`` in all at most."""
        if len(chunks) > self.most_rows:
            return [None] * len(chunks), [0] * len(chunks)
        drafts = [_draft_after(chunk) for chunk in chunks]
        rows = sum(chunk.count for chunk in chunks)
        return drafts, self.lengths(rows, drafts, min(most, self.most_rows))

    def lengths(self, rows: int, drafts: Items[Draft | None], most: int) -> list[int]:
        """How many tokens of each of ``drafts`` to compute, at most ``most`` in all.

        ``rows``: those of the step without drafts, which gives one token to each sequence.
        """
        lengths = [0] * len(drafts)
        tokens = [1.0] * len(drafts)
        speedup = 0.0  # The sum of the logarithms of ``tokens``.
        # The draft that speeds up its sequence most comes first. The next one of a sequence never
        # speeds it up more.
        nexts = [
            (-log1p(draft.chances[0]), index, 0) for index, draft in enumerate(drafts) if draft
        ]
        heapify(nexts)
        gain = (
            LEAST_GAIN_BY_MODEL if any(draft and draft.behind for draft in drafts) else LEAST_GAIN
        )
        best = gain / self.costs.of(rows)
        chosen: list[int] = []
        taken = 0
        # Of each pass of the draft model: the first computes each sequence's first draft.
        passes = [0.0] * MOST_DRAFTS
        drafting_s = 0.0
        while nexts and len(chosen) < most:
            more, index, at = nexts[0]
            draft = drafts[index]
            if not more or draft is None:
                break
            chosen.append(index)
            speedup -= more
            tokens[index] += draft.chances[at]
            chance = draft.chances[at + 1] if at + 1 < len(draft.chances) else 0.0
            heapreplace(nexts, (-log1p(chance / tokens[index]), index, at + 1))
            if draft.behind:
                before, passes[at] = passes[at], passes[at] + (1 if at else draft.behind)
                drafting_s += self._drafting_s(passes[at]) - self._drafting_s(before)
            step_s = self.costs.of(rows + len(chosen)) + drafting_s
            if (speed := exp(speedup / len(drafts)) / step_s) > best:
                best, taken = speed, len(chosen)
        for index in chosen[:taken]:
            lengths[index] += 1
        return lengths

    def _drafting_s(self, rows: float) -> float:
        """Seconds of a pass of the draft model."""
        return 0.0 if self.model is None or not rows else self.model.costs.of(rows)


def _draft_after(chunk: Chunk) -> Draft | None:
    sequence = chunk.sequence
    left = sequence.request.max_tokens - sequence.generated_count
    most = min(MOST_DRAFTS, left - 1)
    if sequence.drafter is None or most <= 0 or not chunk.samples:
        return None
    draft = sequence.drafter.propose(sequence.token_ids, most)
    if draft is None or draft.behind <= 1:
        return draft
    return replace(draft, behind=1 + (draft.behind - 1) / min(SPREAD_TOKENS, left))
