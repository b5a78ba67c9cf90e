"""The embedding: the rows of a matrix that token ids select, dense or as the file stores them."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from llorch_worker.model_files.model_file import CHUNK_ELEMENTS, Bytes
from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.fused_weight import FusedWeight
from llorch_worker.weights.groups import GroupForm

SMALL_EMBEDDING_BYTES: Final = 16 * 2**20
"""Up to here a quantised embedding is dequantised at load: unpacking the rows of a step takes 20 to
120 µs, which a step of a small model would notice, and little memory would be saved."""


class Embedding(Protocol):
    """Token ids [tokens] to their rows [tokens, hidden] in ``dtype``."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor: ...


class DenseEmbedding:
    """A matrix in the compute dtype on any device; ``weight: [vocab, hidden]``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class StoredEmbedding:
    """Rows of a file's blocks on the CPU, dequantised when they are asked for.

    The values have the same bits as those of a ``DenseEmbedding`` of the same tensor.
    """

    def __init__(
        self, rows: torch.Tensor, form: GroupForm, hidden: int, dtype: torch.dtype
    ) -> None:
        """``rows``: [vocab, row bytes] uint8."""
        self.rows = rows
        self.dtype = dtype
        self._form = form
        self._hidden = hidden
        self._piece_rows = max(1, CHUNK_ELEMENTS // hidden)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows, ids = self.rows.numpy(), token_ids.numpy()
        out = torch.empty(len(ids), self._hidden, dtype=self.dtype)
        for first in range(0, len(ids), self._piece_rows):
            values = self._form.dequantise(rows[ids[first : first + self._piece_rows]])
            out[first : first + len(values)] = torch.from_numpy(values)
        return out


def load_embedding(
    checkpoint: Checkpoint,
    weight: FusedWeight,
    dtype: torch.dtype,
    device: torch.device,
    *,
    as_stored: bool,
) -> Embedding:
    """Read the embedding; with ``as_stored`` a large quantised one keeps the file's blocks."""
    form = _kept_form(checkpoint, weight, dtype) if as_stored else None
    if form is None:
        return DenseEmbedding(weight.load(checkpoint, dtype).to(device))
    (part,) = weight.parts
    rows = torch.empty(part.shape[0], _row_bytes(checkpoint, weight), dtype=torch.uint8)
    into = rows.numpy()

    def take(first: int, piece: Bytes, order: npt.NDArray[np.int64] | None) -> None:  # noqa: ARG001 - only rows of Q and K have one
        if not form.finite(piece):
            raise checkpoint.out_of_range(part.name)
        into[first : first + len(piece)] = piece

    checkpoint.each_piece(part.name, take, row_multiple=1)
    return StoredEmbedding(rows, form, part.shape[1], dtype)


def embedding_bytes(
    checkpoint: Checkpoint, weight: FusedWeight, dtype: torch.dtype, *, as_stored: bool
) -> int:
    """The exact bytes that ``load_embedding`` will keep; reads no weights."""
    if as_stored and _kept_form(checkpoint, weight, dtype) is not None:
        return weight.shape[0] * _row_bytes(checkpoint, weight)
    return weight.elements * dtype.itemsize


def _kept_form(checkpoint: Checkpoint, weight: FusedWeight, dtype: torch.dtype) -> GroupForm | None:
    """The form in which the file's blocks are kept; None if the embedding becomes dense."""
    small = weight.elements * dtype.itemsize <= SMALL_EMBEDDING_BYTES
    return None if small else checkpoint.group_form(weight.parts[0].name)


def _row_bytes(checkpoint: Checkpoint, weight: FusedWeight) -> int:
    return checkpoint.tensors[weight.parts[0].name].stored_bytes // weight.shape[0]
