"""The interface of model files of every format: metadata, and tensors under canonical names."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.model_file import Bytes, ModelFile
from llorch_worker.weights.groups import GroupForm
from llorch_worker.weights.rope_order import RopeOrder

TakeRows = Callable[[int, Bytes, npt.NDArray[np.int64] | None], None]
"""Called with (first row, raw rows [rows, row bytes], order): the model's row ``first + i`` is
``rows[order[i]]``, or ``rows[i]`` without an order. The rows are valid during the call only."""


def in_order(
    take: TakeRows, row_multiple: int, order: RopeOrder | None, rows: int
) -> tuple[Callable[[int, Bytes], None], int]:
    """Calls ``take`` with the order of the rows in each piece; and the multiple of its rows.

    Rows move only within a head, so a piece holds whole heads.
    """
    if order is None:
        return lambda first, piece: take(first, piece, None), row_multiple
    source = order.destination(rows).argsort().numpy()
    return (
        lambda first, piece: take(first, piece, source[first : first + len(piece)] - first),
        math.lcm(row_multiple, order.head_dim),
    )


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as it is stored; ``shape`` is row-major, ``[out, in]`` for a matrix."""

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    stored_bytes: int


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """One that lies in a file as a whole."""

    file: ModelFile
    start: int

    def sample(self, at: int, length: int) -> bytes:
        """See :meth:`.Checkpoint.sample`."""
        return self.file.read_at(self.start + at, min(length, self.stored_bytes - at))


class Checkpoint(ABC):
    """An opened model file. Tensors have Hugging Face's names in every format."""

    path: Path
    files: tuple[Path, ...]
    """The files that hold the tensors."""
    layout: Literal["gguf", "hugging_face"]
    metadata: Mapping[str, Any]
    """GGUF key/values, or config.json with generation_config and tokenizer_config inside it."""
    tensors: Mapping[str, TensorInfo]

    @abstractmethod
    def read_into(self, name: str, out: torch.Tensor, order: RopeOrder | None = None) -> None:
        """Fill ``out`` (CPU, the tensor's shape, any float dtype) with the tensor ``name``.

        ``order``: how the file orders the rows; they are put into the model's order.

        Raises:
            ModelLoadFailed: the tensor is missing, its shape or type does not fit, or ``out``'s
                dtype does not hold its values as finite numbers.
        """

    def load(self, name: str, dtype: torch.dtype, order: RopeOrder | None = None) -> torch.Tensor:
        """The tensor ``name`` as a new CPU tensor; see ``read_into``."""
        out = torch.empty(self.require(name).shape, dtype=dtype)
        self.read_into(name, out, order)
        return out

    def group_form(self, name: str) -> GroupForm | None:  # noqa: ARG002
        """How the tensor is quantised; None unless its values are scaled integers."""
        return None

    def each_piece(
        self, name: str, take: TakeRows, *, row_multiple: int, order: RopeOrder | None = None
    ) -> None:
        """Call ``take`` with all rows of a tensor that has a form, raw, in pieces.

        Pieces begin at multiples of ``row_multiple``. They come in any order and from several
        threads at once.
        """
        raise NotImplementedError(f"{name} is not quantised")

    def adds_nothing(self, name: str) -> bool:  # noqa: ARG002
        """Whether a graph that has no such tensor gives the same results without it."""
        return False

    def stored_name(self, name: str) -> str:
        """What the file calls the tensor ``name``, or would if it had it."""
        return name

    @abstractmethod
    def described_by(self) -> Iterator[bytes]:
        """Configuration, tokenizer, chat templates and how vectors are made, as they are stored."""

    @abstractmethod
    def sample(self, name: str, at: int, length: int) -> bytes:
        """``length`` of the stored bytes of a tensor, from its byte ``at`` on, or up to its end."""

    def repeats(self, name: str, other: str) -> bool:
        """Whether two tensors are stored with the same bytes."""
        raise NotImplementedError(f"{name} and {other} cannot be compared")

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """The tensor's entry; raises ModelLoadFailed if it is missing or has another shape."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelLoadFailed(
                f"{self.path} has no tensor {self.stored_name(name)}, which its graph needs; "
                "convert the model again."
            )
        if shape is not None and info.shape != shape:
            raise ModelLoadFailed(
                f"{self.path}: tensor {self.stored_name(name)} is {list(info.shape)} but the "
                f"model's configuration calls for {list(shape)}; weights and configuration do not "
                "belong together."
            )
        return info

    def require_finite(self, name: str, values: torch.Tensor) -> None:
        """Raises ModelLoadFailed if one of the tensor's ``values`` is infinite or NaN.

        Such weights would fail every job. The sum of a chunk takes one pass in the CPU caches; only
        a sum that is itself out of range needs a look at each value.
        """
        if not math.isfinite(values.sum()) and not values.isfinite().all():
            raise self.out_of_range(name)

    def out_of_range(self, name: str) -> ModelLoadFailed:
        """The error for a tensor whose values or scales are infinite, NaN or too large."""
        return ModelLoadFailed(
            f"{self.path}: tensor {self.stored_name(name)} has weights that are out of range; the "
            "file is damaged, download or convert it again."
        )
