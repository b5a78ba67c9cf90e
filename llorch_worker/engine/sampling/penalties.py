"""Repetition, presence and frequency penalties of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from llorch_worker.engine.sequence import Sequence

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
        everyone = len(rows) == len(sequences)
        self._rows = None if everyone else torch.tensor(rows, device=device)
        self._indices = torch.arange(len(rows), device=device)
        # [penalised] float32
        self._repetition, self._presence, self._frequency = torch.tensor(
            [
                [max(r.repetition_penalty, LOWEST_REPETITION_PENALTY) for r in chosen],
                [r.presence_penalty for r in chosen],
                [r.frequency_penalty for r in chosen],
            ],
            dtype=torch.float32,
            device=device,
        )
        # [penalised, vocab] float32: how often each token was generated; the factor that its logit
        # is divided or multiplied by; the price that is subtracted. The last two only if used.
        shape = (len(rows), vocab_size)
        self._counts = torch.zeros(shape, device=device)
        self._factors: torch.Tensor | None = None
        self._prices: torch.Tensor | None = None
        for index, row in enumerate(rows):
            generated = torch.tensor(sequences[row].generated_ids, dtype=torch.int64, device=device)
            self._counts[index] = torch.bincount(generated, minlength=vocab_size)
        if any(r.repetition_penalty != 1 for r in chosen):
            self._factors = torch.ones(shape, device=device)
            for index, row in enumerate(rows):
                seen = torch.tensor(sequences[row].token_ids, device=device)
                self._factors[index, seen] = self._repetition[index]
        if any(r.presence_penalty != 0 or r.frequency_penalty != 0 for r in chosen):
            presence = (self._counts > 0) * self._presence.unsqueeze(1)
            self._prices = self._counts * self._frequency.unsqueeze(1) + presence

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
        tokens = token_ids if self._rows is None else token_ids[self._rows]
        cells = (self._indices, tokens)
        counts = self._counts[cells] + 1  # [penalised]
        self._counts[cells] = counts
        if self._factors is not None:
            self._factors[cells] = self._repetition
        if self._prices is not None:
            self._prices[cells] = counts * self._frequency + self._presence


def _penalised(sequence: Sequence) -> bool:
    request = sequence.request
    return (
        request.repetition_penalty != 1
        or request.presence_penalty != 0
        or request.frequency_penalty != 0
    )
