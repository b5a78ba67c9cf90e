"""Log probabilities of one prompt's own tokens, as its prefill makes them known."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Consecutive tokens of a prompt: ``chosen`` [tokens] float32, their log probabilities;
    ``top_ids`` [tokens, width] int64 and ``top`` [tokens, width] float32, the likeliest tokens."""

    chosen: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int64]
    top: npt.NDArray[np.float32]

    @property
    def damaged(self) -> bool:
        """Whether logits were NaN or infinite."""
        return not np.isfinite(self.chosen).all()


class PromptLogprobs:
    """Those of one prompt. A preemption or a failed step loses none that are known.

    The logits of a token score the next one, so the first token has no log probability, and the
    logits of the last one are not needed.
    """

    def __init__(self, prompt_ids: Ids[int], most_likely: int) -> None:
        """``most_likely`` alternatives are kept for each token."""
        self._prompt_ids = tuple(prompt_ids)
        self._most_likely = most_likely
        self._parts: list[ScoredTokens] = []
        self.read_tokens = 0
        """Tokens from the start whose logits have been read; the prefix cache may skip them."""

    @property
    def complete(self) -> bool:
        return self.read_tokens >= len(self._prompt_ids) - 1

    def due(self, start: int, end: int) -> range:
        """The positions from ``start`` to before ``end`` whose logits are needed."""
        return range(max(start, self.read_tokens), min(end, len(self._prompt_ids) - 1))

    def targets(self, positions: range) -> Ids[int]:
        """The tokens that the logits at ``positions`` score."""
        return self._prompt_ids[positions.start + 1 : positions.stop + 1]

    def take(self, scored: ScoredTokens) -> None:
        """Adds the tokens that the next logits scored."""
        self._parts.append(
            ScoredTokens(
                scored.chosen.copy(),
                scored.top_ids[:, : self._most_likely].copy(),
                scored.top[:, : self._most_likely].copy(),
            )
        )
        self.read_tokens += len(scored.chosen)

    def rows(self) -> Iterator[tuple[int, float, list[int], list[float]]]:
        """Of each token from the second on: id, log probability, and the likeliest ids with theirs.

        Any thread may read them once they are complete.
        """
        ids = iter(self._prompt_ids[1:])
        for part in self._parts:
            columns = part.chosen.tolist(), part.top_ids.tolist(), part.top.tolist()
            for chosen, top_ids, top in zip(*columns, strict=True):
                yield next(ids), chosen, top_ids, top
