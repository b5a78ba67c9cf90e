"""Scores the prompt tokens of one step on the device, in pieces of few rows of logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.contract.request import MAX_LOGPROBS
from llorch_worker.engine.device.queue import to_host
from llorch_worker.engine.prompt_logprobs import ScoredTokens
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``chosen`` [rows, 1], ``top_ids`` and ``top`` [rows, width], as in ``ScoredTokens``."""


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
        vocab_size: int,
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
        self._most_likely = min(MAX_LOGPROBS, vocab_size) if wanted else 0
        self._scores: Scores | None = None

    @classmethod
    def of(cls, chunks: Items[Chunk], piece_rows: int, vocab_size: int) -> PromptScorer | None:
        """The scorer of a step with these ``chunks``; None if it scores nothing."""
        if not [chunk for chunk in chunks if chunk.sequence.prompt_logprobs]:
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
            offset += chunk.rows
        if not rows:
            return None
        arrays = np.array(rows, np.int64), np.array(targets, np.int64)
        return cls(*arrays, shares, piece_rows, vocab_size)

    def score(
        self,
        rows: torch.Tensor,
        targets: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``rows`` and ``targets`` on the device; see ``RaggedBatch.read_logits``."""
        chosen = torch.empty(len(rows), 1, device=rows.device)
        top = torch.empty(len(rows), self._most_likely, device=rows.device)
        # Made before the logits: malloc would put them behind each piece's, and keep its memory.
        self._scores = chosen, torch.empty_like(top, dtype=torch.int64), top
        columns = (targets.unsqueeze(1), *self._scores)
        pieces = (column.split(self._piece_rows) for column in (rows, *columns))
        for piece, *scores in zip(*pieces, strict=True):
            # A call of its own, so that nothing holds one piece's logits while the next is made.
            _score(logits_of(piece), *scores)
        self._scores = to_host(chosen), to_host(self._scores[1]), to_host(top)

    def read(self) -> list[tuple[Sequence, ScoredTokens]]:
        """Once the device is done."""
        if self._scores is None:
            raise RuntimeError("the model has not let its logits be read")
        chosen, top_ids, top = (scores.numpy() for scores in self._scores)
        ends = np.cumsum([length for _, length in self._shares])[:-1]
        columns = (np.split(column, ends) for column in (chosen[:, 0], top_ids, top))
        scored = (ScoredTokens(*parts) for parts in zip(*columns, strict=True))
        owners = (sequence for sequence, _ in self._shares)
        return list(zip(owners, scored, strict=True))


def _score(
    logits: torch.Tensor,
    targets: torch.Tensor,
    chosen: torch.Tensor,
    top_ids: torch.Tensor,
    top: torch.Tensor,
) -> None:
    """logits: [rows, vocab] float32; targets: [rows, 1]; writes the others, ``Scores``."""
    logprobs = logits.log_softmax(dim=-1)
    torch.gather(logprobs, 1, targets, out=chosen)
    torch.topk(logprobs, top.shape[1], dim=-1, out=(top, top_ids))
