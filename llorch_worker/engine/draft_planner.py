"""Which drafts of each sequence a step shall have."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from heapq import heapify, heapreplace
from math import exp, log, log1p, log2
from typing import Final

from msgspec.structs import replace

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.device.step_errors import MEMORY_PAUSE_S
from llorch_worker.engine.device.warm_up import measure_steps
from llorch_worker.engine.drafter import Draft
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk
from llorch_worker.model import ForwardModel

LEAST_GAIN: Final = 1.05
"""Drafts must promise this many times the speed without, because both sides are estimates."""
MOST_DRAFTS: Final = 15
"""Drafts of one sequence in a step."""
SHARED_RATE: Final = 0.25
"""How much the newest step counts for steps of all sizes: a busy machine slows all down."""
NEAR_RATE: Final = 0.05
"""How much more it counts for steps of its own size. Far less, because steps of one size alone must
not change how they compare with the others."""
MOST_CHANGE: Final = log(2)
"""A step that waited for something else counts as at most twice as long."""
UNMEASURED: Final = {1: 1.0, 16: 2.0, 64: 5.0}
"""Until the warm-up: 16 rows take twice as long as one."""


class DraftPlanner:
    """Chooses the drafts with which a step promises the highest speed of its sequences.

    That is the geometric mean of their tokens per second: drafts lengthen the step for all, so what
    some sequences gain counts against what the others lose. The sum would let one sequence that
    repeats a text slow down many that do not.
    """

    def __init__(self, most_rows: int) -> None:
        """A step has at most ``most_rows`` drafts."""
        self.most_rows = most_rows
        self.costs = StepCosts()
        self._pauses_until_s = 0.0

    def measure(self, model: ForwardModel, cache: UnifiedCache, rows: int) -> None:
        """Measures steps of ``model`` with up to so many rows; see :func:`measure_steps`."""
        self.costs = StepCosts(measure_steps(model, cache, rows))

    def pause(self) -> None:
        """For a while no step has drafts: there is no memory for them."""
        self._pauses_until_s = time.monotonic() + MEMORY_PAUSE_S

    def pays(self, chunks: Items[Chunk]) -> bool:
        """Whether some of these decodes shall have drafts."""
        return any(self._proposals(chunks, self.most_rows)[1])

    def with_drafts(
        self, chunks: list[Chunk], budget: int, allocate: Callable[[Sequence, int], bool]
    ) -> list[Chunk]:
        """These decodes with the drafts that pay, ``budget`` of them at most.

        ``allocate`` gives a sequence blocks for so many tokens, or says that there are none.
        """
        drafted = []
        for chunk, draft, length in zip(chunks, *self._proposals(chunks, budget), strict=True):
            tokens = len(chunk.sequence.token_ids) + length
            if draft and length and allocate(chunk.sequence, tokens):
                drafted.append(replace(chunk, drafts=tuple(draft.token_ids[:length])))
            else:
                drafted.append(chunk)
        return drafted

    def _proposals(self, chunks: Items[Chunk], most: int) -> tuple[list[Draft | None], list[int]]:
        """What may follow each decode, and how many tokens of it pay, ``most`` in all at most."""
        if len(chunks) > self.most_rows or time.monotonic() < self._pauses_until_s:
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
        best = LEAST_GAIN / self.costs.of(rows)
        chosen: list[int] = []
        taken = 0
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
            step_s = self.costs.of(rows + len(chosen))
            if (speed := exp(speedup / len(drafts)) / step_s) > best:
                best, taken = speed, len(chosen)
        for index in chosen[:taken]:
            lengths[index] += 1
        return lengths


def _draft_after(chunk: Chunk) -> Draft | None:
    sequence = chunk.sequence
    most = min(MOST_DRAFTS, sequence.max_tokens - sequence.generated_count - 1)
    if sequence.drafter is None or most <= 0 or not chunk.samples:
        return None
    return sequence.drafter.propose(sequence.token_ids, most)


class StepCosts:
    """Seconds by rows: linear between the sizes that the warm-up measures, and kept current."""

    def __init__(self, seconds: Mapping[int, float] = UNMEASURED) -> None:
        """``seconds``: of at least two sizes."""
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]

    def of(self, rows: float) -> float:
        """Seconds that a step of ``rows`` takes."""
        sizes, seconds = self._sizes, self._seconds
        right = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        left = right - 1
        share = (rows - sizes[left]) / (sizes[right] - sizes[left])
        return max(seconds[left] + share * (seconds[right] - seconds[left]), 1e-9)

    def note(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` has taken this long."""
        change = log(seconds / self.of(rows))
        change = max(-MOST_CHANGE, min(MOST_CHANGE, change))
        for index, size in enumerate(self._sizes):
            near = max(0.0, 1 - abs(log2(size / rows)))
            self._seconds[index] *= exp(change * (SHARED_RATE + NEAR_RATE * near))
