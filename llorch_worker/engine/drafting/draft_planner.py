"""How many drafts of each sequence a step shall have."""

from __future__ import annotations

from collections.abc import Sequence as Items
from heapq import heapify, heapreplace
from typing import Final

from llorch_worker.engine.drafting.drafter import Draft
from llorch_worker.engine.drafting.step_costs import StepCosts

LEAST_GAIN: Final = 1.05
"""Drafts must promise this many times the speed without, because both sides are estimates."""
MOST_DRAFTS: Final = 15
"""Drafts of one sequence in a step."""


class DraftPlanner:
    """Chooses the drafts with which a step promises the most tokens per second."""

    def __init__(self, most_rows: int) -> None:
        """A step has at most ``most_rows`` drafts."""
        self.most_rows = most_rows
        self.costs = StepCosts()

    def lengths(self, rows: int, drafts: Items[Draft | None], most: int) -> list[int]:
        """How many tokens of each of ``drafts`` to compute, at most ``most`` in all.

        ``rows``: those of the step without drafts, which gives one token to each sequence.
        """
        lengths = [0] * len(drafts)
        # The likeliest next draft first; chances fall along a draft.
        nexts = [(-draft.chances[0], index, 0) for index, draft in enumerate(drafts) if draft]
        heapify(nexts)
        tokens = float(len(drafts))
        best = tokens / self.costs.of(rows) * LEAST_GAIN
        chosen: list[int] = []
        taken = 0
        while nexts and len(chosen) < most:
            chance, index, at = nexts[0]
            draft = drafts[index]
            if not chance or draft is None:
                break
            chosen.append(index)
            tokens -= chance
            following = -draft.chances[at + 1] if at + 1 < len(draft.chances) else 0.0
            heapreplace(nexts, (following, index, at + 1))
            if (speed := tokens / self.costs.of(rows + len(chosen))) > best:
                best, taken = speed, len(chosen)
        for index in chosen[:taken]:
            lengths[index] += 1
        return lengths
