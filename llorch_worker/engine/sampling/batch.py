"""The sampling parameters of a batch as tensors, built once while its rows stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.sampling.penalties import Penalties
from llorch_worker.engine.sequence import Sequence
from llorch_worker.kernels import SampledRows
from llorch_worker.kernels.upload import on_device


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Parameters of the rows that are not greedy.

    ``rows`` [random] int64, or None if every row is random; ``temperatures`` [random, 1] float32;
    ``seeds`` [random] int64; ``truncation`` None if no row uses it.
    """

    rows: torch.Tensor | None
    temperatures: torch.Tensor
    seeds: torch.Tensor
    truncation: Truncation | None


@dataclass(frozen=True, slots=True)
class Biases:
    """logit_bias of all rows as a list of ``cells`` of [rows * vocab], int64; ``values``
    float32."""

    cells: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Suppressions:
    """``cells`` of [rows * vocab] that are forbidden until their ``rows`` have ``until`` tokens."""

    cells: torch.Tensor
    rows: torch.Tensor
    until: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows that request log probabilities, their ``numbers``, and how many alternatives each
    wants; ``rows`` [wanting] int64 has the numbers on the device, None if all rows want some."""

    rows: torch.Tensor | None
    numbers: list[int]
    tops: list[int]


LOWEST_TEMPERATURE = 1e-6
"""Below this the likeliest token is almost certain, and a division in float32 would overflow."""


class SamplingBatch:
    """The parameters of a batch that stay the same from step to step.

    A parameter that no row uses is None, and the sampler skips it.
    """

    def __init__(
        self,
        sequences: Rows[Sequence],
        vocab_size: int,
        device: torch.device,
        before: SamplingBatch | None,
        row_before: Mapping[int, int],
    ) -> None:
        """``before``: the batch of the step before, and which of its rows goes on in which of
        these."""
        self._device = device
        self._vocab_size = vocab_size
        self.sequences = sequences
        requests = [sequence.request for sequence in sequences]
        random = [row for row, request in enumerate(requests) if request.temperature > 0]
        self.random = self._random_rows(sequences, random) if random else None
        self.penalties: Penalties | None = Penalties.of(
            sequences,
            vocab_size,
            device,
            None if before is None else before.penalties,
            row_before,
        )
        self.biases = self._biases(sequences)
        self.constrained = [row for row, s in enumerate(sequences) if s.constrained]
        self._masked = self._with_masks()
        self.suppressions = self._suppressions(sequences)
        wanting = [row for row, r in enumerate(requests) if r.logprobs is not None]
        self.logprob_rows = self._logprob_rows(requests, wanting) if wanting else None

    def is_of(self, sequences: Rows[Sequence]) -> bool:
        """Whether it is that of these rows: no other ones, and no grammar or thought has begun."""
        return self.sequences == sequences and self._masked == self._with_masks()

    def _with_masks(self) -> set[int]:
        return {row for row in self.constrained if self.sequences[row].matcher is not None}

    @cached_property
    def sampled_rows(self) -> SampledRows:
        """The parameters of all rows, for ``FusedSample``."""
        requests = [sequence.request for sequence in self.sequences]
        limits = self._limits(requests)
        temperatures = [
            max(r.temperature, LOWEST_TEMPERATURE) if r.temperature > 0 else 0.0 for r in requests
        ]
        return SampledRows(
            temperatures=self._row(temperatures, torch.float32),
            log_min_p=limits.log_min_p,
            top_k=limits.top_k,
            top_p=limits.top_p,
            seeds=self._row([sequence.seed for sequence in self.sequences]),
            truncates=self.random is not None and self.random.truncation is not None,
        )

    def _logprob_rows(self, requests: Rows[GenerationRequest], wanting: list[int]) -> LogprobRows:
        return LogprobRows(
            rows=None if len(wanting) == len(requests) else self._row(wanting),
            numbers=wanting,
            tops=[requests[row].logprobs or 0 for row in wanting],
        )

    def _random_rows(self, sequences: Rows[Sequence], random: list[int]) -> RandomRows:
        requests = [sequences[row].request for row in random]
        everyone = len(random) == len(sequences)
        return RandomRows(
            rows=None if everyone else self._row(random),
            temperatures=self._row(
                [max(r.temperature, LOWEST_TEMPERATURE) for r in requests], torch.float32
            ).unsqueeze(1),
            seeds=self._row([sequences[row].seed for row in random]),
            truncation=self._truncation(requests),
        )

    def _truncation(self, requests: Rows[GenerationRequest]) -> Truncation | None:
        truncated = [
            row
            for row, request in enumerate(requests)
            if request.min_p > 0 or 0 < request.top_k < self._vocab_size or request.top_p < 1
        ]
        if not truncated:
            return None
        limits = self._limits([requests[row] for row in truncated])
        everyone = len(truncated) == len(requests)
        return limits if everyone else replace(limits, rows=self._row(truncated))

    def _limits(self, requests: Rows[GenerationRequest]) -> Truncation:
        vocab = self._vocab_size
        return Truncation(
            rows=None,
            # log(0) = -inf keeps everything.
            log_min_p=self._row([request.min_p for request in requests], torch.float32).log(),
            top_k=self._row([min(r.top_k or vocab, vocab) for r in requests]),
            top_p=self._row(
                [r.top_p if r.top_p < 1 else torch.inf for r in requests], torch.float64
            ),
        )

    def _biases(self, sequences: Rows[Sequence]) -> Biases | None:
        vocab = self._vocab_size
        cells = [
            (row * vocab + token_id, bias)
            for row, sequence in enumerate(sequences)
            for token_id, bias in (sequence.request.logit_bias or {}).items()
        ]
        if not cells:
            return None
        return Biases(
            cells=self._row([cell for cell, _ in cells]),
            values=self._row([bias for _, bias in cells], torch.float32),
        )

    def _suppressions(self, sequences: Rows[Sequence]) -> Suppressions | None:
        vocab = self._vocab_size
        cells = [
            (row * vocab + token_id, row, sequence.request.min_tokens)
            for row, sequence in enumerate(sequences)
            # A grammar's mask decides for itself where a text may end; a thought has none.
            if row not in self._masked
            if sequence.generated_count < sequence.request.min_tokens
            for token_id in sorted(sequence.stop_ids)
            # A model's file may name an end that has no logit: its cell would be the next row's.
            if token_id < vocab
        ]
        if not cells:
            return None
        return Suppressions(
            cells=self._row([cell[0] for cell in cells]),
            rows=self._row([cell[1] for cell in cells]),
            until=self._row([cell[2] for cell in cells]),
            longest=max(cell[2] for cell in cells),
        )

    def _row(self, values: Rows[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return on_device(values, dtype, self._device)


@dataclass(frozen=True, slots=True)
class Truncation:
    """min_p, top_k and top_p of the random rows that use one of them.

    Each rule keeps the tokens at or above a threshold, ties included, so that no result depends on
    the order of a sort. Thresholds are compared with the scaled logits, which are exact. A softmax
    may round neighbouring logits to the same weight.

    ``rows`` [truncated] int64 index into the random rows, or None for all of them; the others are
    as in ``TruncateRows``.
    """

    rows: torch.Tensor | None
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
