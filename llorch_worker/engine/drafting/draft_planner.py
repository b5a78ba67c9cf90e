"""How many drafts of each sequence a step shall have."""

from __future__ import annotations

from collections.abc import Sequence as Items
from heapq import heapify, heapreplace
from typing import Any, Final, Protocol

from llorch_worker.engine.drafting.drafter import Draft
from llorch_worker.engine.drafting.step_costs import StepCosts

LEAST_GAIN: Final = 1.05
"""Drafts must promise this many times the speed without, because both sides are estimates."""
LEAST_GAIN_BY_MODEL: Final = 1.3
"""And so many times those of a draft model, whose gain is small enough that what the estimates lack
decides: the warm-up does not measure how long it takes to sample each draft."""
MOST_DRAFTS: Final = 15
"""Drafts of one sequence in a step."""


class Guesser(Protocol):
    """A draft model; see :class:`.DraftModel`."""

    costs: StepCosts
    spent_s: float

    def guess(self, wanted: Items[tuple[Any, int]]) -> dict[Any, list[int]] | None:
        """So many tokens for each of these sequences; None if it fails."""


class DraftPlanner:
    """Chooses the drafts with which a step promises the most tokens per second."""

    def __init__(self, most_rows: int, model: Guesser | None = None) -> None:
        """A step has at most ``most_rows`` drafts. ``model`` computes those of its drafters."""
        self.most_rows = most_rows
        self.model = model
        self.costs = StepCosts()

    @property
    def spent_s(self) -> float:
        """Seconds that the draft model has taken so far."""
        return 0.0 if self.model is None else self.model.spent_s

    def lengths(self, rows: int, drafts: Items[Draft | None], most: int) -> list[int]:
        """How many tokens of each of ``drafts`` to compute, at most ``most`` in all.

        ``rows``: those of the step without drafts, which gives one token to each sequence.
        """
        lengths = [0] * len(drafts)
        # The likeliest next draft first; chances fall along a draft.
        nexts = [(-draft.chances[0], index, 0) for index, draft in enumerate(drafts) if draft]
        heapify(nexts)
        tokens = float(len(drafts))
        gain = (
            LEAST_GAIN_BY_MODEL if any(draft and draft.behind for draft in drafts) else LEAST_GAIN
        )
        best = tokens / self.costs.of(rows) * gain
        chosen: list[int] = []
        taken = 0
        # Of each pass of the draft model: the first computes each sequence's first draft.
        passes = [0.0] * MOST_DRAFTS
        drafting_s = 0.0
        while nexts and len(chosen) < most:
            chance, index, at = nexts[0]
            draft = drafts[index]
            if not chance or draft is None:
                break
            chosen.append(index)
            tokens -= chance
            following = -draft.chances[at + 1] if at + 1 < len(draft.chances) else 0.0
            heapreplace(nexts, (following, index, at + 1))
            if draft.behind:
                before, passes[at] = passes[at], passes[at] + (1 if at else draft.behind)
                drafting_s += self._drafting_s(passes[at]) - self._drafting_s(before)
            if (speed := tokens / (self.costs.of(rows + len(chosen)) + drafting_s)) > best:
                best, taken = speed, len(chosen)
        for index in chosen[:taken]:
            lengths[index] += 1
        return lengths

    def _drafting_s(self, rows: float) -> float:
        """Seconds of a pass of the draft model."""
        return 0.0 if self.model is None or not rows else self.model.costs.of(rows)
