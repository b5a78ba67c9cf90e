"""One forward pass: its input, all new tokens of all sequences in one row, and what computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from llorch_worker.cache import Places, UnifiedCache


@dataclass(frozen=True)
class RaggedBatch:
    """One engine step. Tensors are int64 on the model's device, block tables int32.

    Sequence i owns the next ``query_lengths[i]`` entries of the token row. Sequences with one new
    token come first: attention's decode path takes those before the first longer one, as a slice.
    Lengths are plain ints: shapes depend on them, and reading them back from the device would wait
    for it.
    """

    token_ids: torch.Tensor
    """[tokens]"""
    positions: torch.Tensor
    """[tokens], each token's position in its own sequence."""
    query_lengths: tuple[int, ...]
    """New tokens of each sequence, at least one; they sum to ``tokens``."""
    context_lengths: tuple[int, ...]
    """Tokens of each sequence in the KV cache after this step, including the new ones."""
    places: tuple[Places, ...]
    """Of each group of layers, in the order of ``CacheShape.groups``."""
    logits_rows: torch.Tensor
    """[rows], indices into the token row of the tokens whose logits are wanted."""
    device_contexts: torch.Tensor | None = None
    """[sequences], the context lengths of decodes that are recorded once and replayed;
    ``context_lengths`` are then upper bounds."""
    read_logits: Callable[[Callable[[torch.Tensor], torch.Tensor]], None] | None = None
    """Reads the logits of further rows. The model calls it with a function that computes those of
    any rows, [rows, vocab] float32, so that the reader decides how many exist at once."""


class ForwardModel(Protocol):
    """A model that computes a batch, such as :class:`llorch_worker.model.Transformer`."""

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """Logits [rows, vocab] float32 for ``batch.logits_rows``."""
