"""Scores the prompt tokens of one step on the device, in pieces of few rows of logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.contract.request import MAX_LOGPROBS
from llorch_worker.engine.prompt_logprobs import ScoredTokens
from llorch_worker.engine.scheduler import Chunk
from llorch_worker.engine.sequence import Sequence

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``chosen`` [rows], ``top_ids`` and ``top`` [rows, width], as in ``ScoredTokens``."""


class PromptScorer:
    """The log probabilities of one step's prompt tokens under the model's own distribution.

    The host makes it at the launch, ``score`` runs on the device, and ``read`` waits for the
    results.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        shares: list[tuple[Sequence, int]],
        piece_rows: int,
    ) -> None:
        """``rows`` [scored] are indices into the step's token row, and ``targets`` [scored] the
        tokens that follow them; ``shares`` says how many of them belong to whom. At most
        ``piece_rows`` rows of logits exist at once."""
        self.rows = rows
        self.targets = targets
        self._shares = shares
        self._piece_rows = piece_rows
        # Always the same number of alternatives: which one of equal logits comes first depends on
        # it.
        wanted = any(sequence.request.prompt_logprobs for sequence, _ in shares)
        self._most_likely = MAX_LOGPROBS if wanted else 0
        self._scores: list[Scores] = []

    @classmethod
    def of(cls, chunks: Items[Chunk], piece_rows: int) -> PromptScorer | None:
        """The scorer of a step with these ``chunks``; None if it scores nothing."""
        if not any(chunk.sequence.prompt_logprobs for chunk in chunks):
            return None
        rows: list[int] = []
        targets: list[int] = []
        shares: list[tuple[Sequence, int]] = []
        offset = 0
        for chunk in chunks:
            prompt = chunk.sequence.prompt_logprobs
            if prompt is not None and (due := prompt.due(chunk.start, chunk.start + chunk.count)):
                rows += range(offset + due.start - chunk.start, offset + due.stop - chunk.start)
                targets += prompt.targets(due)
                shares.append((chunk.sequence, len(due)))
            offset += chunk.count
        if not rows:
            return None
        return cls(np.array(rows, np.int64), np.array(targets, np.int64), shares, piece_rows)

    def score(
        self,
        rows: torch.Tensor,
        targets: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``rows`` and ``targets`` on the device; see ``RaggedBatch.read_logits``."""
        pieces = rows.split(self._piece_rows), targets.split(self._piece_rows)
        for piece, tokens in zip(*pieces, strict=True):
            # A call of its own, so that nothing holds one piece's logits while the next is made.
            self._scores.append(self._score(logits_of(piece), tokens))

    def _score(self, logits: torch.Tensor, targets: torch.Tensor) -> Scores:
        """logits: [rows, vocab] float32; targets: [rows]."""
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)
        top, top_ids = logprobs.topk(min(self._most_likely, logprobs.shape[-1]), dim=-1)
        return chosen, top_ids, top

    def read(self) -> list[tuple[Sequence, ScoredTokens]]:
        """Waits for the device."""
        ends = np.cumsum([length for _, length in self._shares])[:-1]
        arrays: list[list[Any]] = [
            np.split(torch.cat(parts).cpu().numpy(), ends)
            for parts in zip(*self._scores, strict=True)
        ]
        scored = (ScoredTokens(*parts) for parts in zip(*arrays, strict=True))
        owners = (sequence for sequence, _ in self._shares)
        return list(zip(owners, scored, strict=True))
