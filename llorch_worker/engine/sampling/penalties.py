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
        self,
        sequences: Rows[Sequence],
        rows: Rows[int],
        vocab_size: int,
        device: torch.device,
        before: Penalties | None,
        row_before: Mapping[int, int],
    ) -> None:
        """``rows``: which of the batch's ``sequences`` are penalised. ``before``: the penalties of
        the batch before, and which of its rows goes on in which of these: only the device may know
        the last token of such a row."""
        chosen = [sequences[row].request for row in rows]
        self._device = device
        self._vocab_size = vocab_size
        self._index_of = {row: index for index, row in enumerate(rows)}
        everyone = len(rows) == len(sequences)
        self._rows = None if everyone else on_device(rows, torch.int64, device)
        # [penalised]: where each row begins in [penalised * vocab].
        firsts = np.arange(len(rows)) * vocab_size
        self._firsts = on_device(firsts, torch.int64, device)
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
        old = {} if before is None else before._index_of
        kept = {
            index: old[row_before[row]]
            for row, index in self._index_of.items()
            if row_before.get(row) in old
        }
        self._kept: tuple[Penalties, torch.Tensor, torch.Tensor] | None = None
        if before is not None and kept:
            here, there = on_device([list(kept), list(kept.values())], torch.int64, device)
            self._kept = before, here, there
        new = [None if index in kept else sequences[row] for row, index in self._index_of.items()]
        cells, _ = self._cells([each.generated_ids if each else () for each in new])
        self._counts.view(-1).index_add_(0, cells, torch.ones(1, device=device).expand(len(cells)))
        if any(r.repetition_penalty != 1 for r in chosen):
            self._factors = torch.ones(shape, device=device)
            cells, owners = self._cells([each.token_ids if each else () for each in new])
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
        cls,
        sequences: Rows[Sequence],
        vocab_size: int,
        device: torch.device,
        before: Penalties | None,
        row_before: Mapping[int, int],
    ) -> Penalties | None:
        """Penalties of a batch, or None when no row has any; see ``__init__``."""
        rows = [row for row, sequence in enumerate(sequences) if _penalised(sequence)]
        return cls(sequences, rows, vocab_size, device, before, row_before) if rows else None

    def take_over(self) -> None:
        """Copies the rows that go on, once the batch before has counted its last token."""
        if self._kept is None:
            return
        (before, here, there), self._kept = self._kept, None
        self._counts[here] = before._counts[there]
        # A row that uses either has it there, too.
        if self._factors is not None and before._factors is not None:
            self._factors[here] = before._factors[there]
        if self._prices is not None and before._prices is not None:
            self._prices[here] = before._prices[there]

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
        cells = self._firsts + (token_ids if self._rows is None else token_ids[self._rows])
        counts = self._counts.view(-1)[cells].add_(1)  # [penalised]
        self._counts.view(-1).index_copy_(0, cells, counts)
        if self._factors is not None:
            self._factors.view(-1).index_copy_(0, cells, self._repetition)
        if self._prices is not None:
            prices = counts.mul_(self._frequency).add_(self._presence)
            self._prices.view(-1).index_copy_(0, cells, prices)


def _penalised(sequence: Sequence) -> bool:
    request = sequence.request
    return (
        request.repetition_penalty != 1
        or request.presence_penalty != 0
        or request.frequency_penalty != 0
    )
