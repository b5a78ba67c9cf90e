"""Repetition, presence and frequency penalties of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from llorch_worker.engine.sequence import Sequence


class Penalties:
    """Counts of seen tokens and the penalties on them, one row for each penalised sequence.

    Repetition divides positive and multiplies negative logits of tokens seen in prompt or output
    (Keskar et al. 2019, as in Hugging Face transformers). Presence and frequency are subtracted
    for tokens of the output alone (OpenAI's definition).
    """

    def __init__(
        self, sequences: Rows[Sequence], rows: Rows[int], vocab_size: int, device: torch.device
    ) -> None:
        """``rows``: which of the batch's ``sequences`` are penalised."""
        chosen = [sequences[row].request for row in rows]
        self._rows = torch.tensor(rows, device=device)
        self._repetition = _column([r.repetition_penalty for r in chosen], device)
        self._presence = _column([r.presence_penalty for r in chosen], device)
        self._frequency = _column([r.frequency_penalty for r in chosen], device)
        # [penalised, vocab]: how often each token was generated; whether the prompt has it.
        self._counts = torch.zeros(len(rows), vocab_size, dtype=torch.float32, device=device)
        self._in_prompt = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        for index, row in enumerate(rows):
            ids = torch.tensor(sequences[row].token_ids, device=device)
            prompt, generated = ids.tensor_split([sequences[row].prompt_length])
            self._in_prompt[index, prompt] = True
            self._counts[index] = torch.bincount(generated, minlength=vocab_size)
        self._indices = torch.arange(len(rows), device=device)

    @classmethod
    def of(
        cls, sequences: Rows[Sequence], vocab_size: int, device: torch.device
    ) -> Penalties | None:
        """Penalties of a batch, or None when no row has any."""
        rows = [row for row, sequence in enumerate(sequences) if _penalised(sequence)]
        return cls(sequences, rows, vocab_size, device) if rows else None

    def apply(self, logits: torch.Tensor) -> None:
        """Changes ``logits`` [rows, vocab] float32 in place."""
        values = logits[self._rows]
        generated = self._counts > 0
        scaled = torch.where(values > 0, values / self._repetition, values * self._repetition)
        values = torch.where(generated | self._in_prompt, scaled, values)
        values -= self._counts * self._frequency
        values -= generated * self._presence
        logits[self._rows] = values

    def count(self, token_ids: torch.Tensor) -> None:
        """Notes the tokens that the step chose, ``token_ids`` [rows] int64."""
        self._counts[self._indices, token_ids[self._rows]] += 1


def _penalised(sequence: Sequence) -> bool:
    request = sequence.request
    return (
        request.repetition_penalty != 1
        or request.presence_penalty != 0
        or request.frequency_penalty != 0
    )


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
