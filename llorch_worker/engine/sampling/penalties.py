"""Repetition, presence and frequency penalties of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from itertools import chain

import numpy as np
import torch

from llorch_worker.engine.sequence import Sequence
from llorch_worker.kernels.upload import on_device

LOWEST_REPETITION_PENALTY = 1e-6
"""Below this a division in float32 would overflow, and infinite logits cannot be ranked."""


class Penalties:
    """The penalty of each token of each penalised row, updated token by token.

    Repetition divides positive and multiplies negative logits of tokens seen in prompt or output
    (Keskar et al. 2019, as in Hugging Face transformers). Presence and frequency are subtracted
    for tokens of the output alone (OpenAI's definition).
    """

    def __init__(
        self, sequences: Rows[Sequence], rows: Rows[int], vocab_size: int, device: torch.device
    ) -> None:
        """``rows``: which of the batch's ``sequences`` are penalised."""
        chosen = [sequences[row].request for row in rows]
        self._device = device
        self._vocab_size = vocab_size
        self._numbers = rows
        everyone = len(rows) == len(sequences)
        self._rows = None if everyone else on_device(rows, torch.int64, device)
        self._indices = on_device(range(len(rows)), torch.int64, device)
        # [penalised] float32
        self._repetition, self._presence, self._frequency = on_device(
            [
                [max(r.repetition_penalty, LOWEST_REPETITION_PENALTY) for r in chosen],
                [r.presence_penalty for r in chosen],
                [r.frequency_penalty for r in chosen],
            ],
            torch.float32,
            device,
        )
        # [penalised, vocab] float32: how often each token was generated; the factor that its logit
        # is divided or multiplied by; the price that is subtracted. The last two only if used.
        shape = (len(rows), vocab_size)
        self._counts = torch.zeros(shape, device=device)
        self._factors: torch.Tensor | None = None
        self._prices: torch.Tensor | None = None
        cells, _ = self._cells([sequences[row].generated_ids for row in rows])
        self._counts.view(-1).index_add_(0, cells, torch.ones(1, device=device).expand(len(cells)))
        if any(r.repetition_penalty != 1 for r in chosen):
            self._factors = torch.ones(shape, device=device)
            cells, owners = self._cells([sequences[row].token_ids for row in rows])
            self._factors.view(-1)[cells] = self._repetition[owners]
        if any(r.presence_penalty != 0 or r.frequency_penalty != 0 for r in chosen):
            presence = (self._counts > 0) * self._presence.unsqueeze(1)
            self._prices = self._counts * self._frequency.unsqueeze(1) + presence

    def _cells(self, ids: Rows[Rows[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where in [penalised * vocab] the tokens of each row lie, and whose each is."""
        owners = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
        tokens = np.fromiter(chain.from_iterable(ids), np.int64, len(owners))
        both = np.stack([owners * self._vocab_size + tokens, owners])
        cells, whose = on_device(both, torch.int64, self._device)
        return cells, whose

    @classmethod
    def of(
        cls, sequences: Rows[Sequence], vocab_size: int, device: torch.device
    ) -> Penalties | None:
        """Penalties of a batch, or None when no row has any."""
        rows = [row for row, sequence in enumerate(sequences) if _penalised(sequence)]
        return cls(sequences, rows, vocab_size, device) if rows else None

    def apply(self, logits: torch.Tensor) -> None:
        """Changes ``logits`` [rows, vocab] float32 in place."""
        values = logits if self._rows is None else logits[self._rows]
        if self._factors is not None:
            # The sum of a positive and a negative part, one of which is 0.
            divided = values.clamp(min=0).div_(self._factors)
            values.clamp_(max=0).mul_(self._factors).add_(divided)
        if self._prices is not None:
            values -= self._prices
        if self._rows is not None:
            logits[self._rows] = values

    def count(self, token_ids: torch.Tensor) -> None:
        """Counts the tokens that the step chose, ``token_ids`` [rows] int64."""
        self.count_at(self._indices, token_ids if self._rows is None else token_ids[self._rows])

    def uncounted(
        self, sequences: Rows[Sequence], row_before: Mapping[Sequence, int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """For :meth:`count_at`: which of the penalised rows have a last token that only the device
        knows, and the rows of these tokens in the step before; None if none has."""
        pairs = [
            (index, row_before[sequences[row]])
            for index, row in enumerate(self._numbers)
            if sequences[row] in row_before
        ]
        if not pairs:
            return None
        indices, rows = on_device(list(zip(*pairs, strict=True)), torch.int64, self._device)
        return indices, rows

    def count_at(self, indices: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts ``tokens`` [some] int64 for the penalised rows ``indices`` [some] int64."""
        cells = (indices, tokens)
        counts = self._counts[cells] + 1  # [penalised]
        self._counts[cells] = counts
        if self._factors is not None:
            self._factors[cells] = self._repetition[indices]
        if self._prices is not None:
            self._prices[cells] = counts * self._frequency[indices] + self._presence[indices]


def _penalised(sequence: Sequence) -> bool:
    request = sequence.request
    return (
        request.repetition_penalty != 1
        or request.presence_penalty != 0
        or request.frequency_penalty != 0
    )
