"""What every model file offers, whatever its format: metadata and tensors under canonical names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.weights.groups import GroupForm, Groups
from llorch_worker.weights.model_file import Bytes

TakeRows = Callable[[int, Bytes, npt.NDArray[np.int64] | None], None]
"""Called with (first row, raw rows [rows, row bytes], order): the model's row ``first + i`` is
``rows[order[i]]``, or ``rows[i]`` where there is no order. Valid during the call."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as it lies in the file; ``shape`` is row-major, ``[out, in]`` for a matrix."""

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    stored_bytes: int


class Checkpoint(Protocol):
    """An opened model file. Tensor names are Hugging Face's, whatever the file calls them."""

    path: Path
    files: tuple[Path, ...]
    """That hold the tensors."""
    layout: Literal["gguf", "hugging_face"]
    metadata: Mapping[str, Any]
    """GGUF key/values, or config.json with generation_config and tokenizer_config inside it."""
    tensors: Mapping[str, TensorInfo]

    def read_into(self, name: str, out: torch.Tensor, rope_heads: int | None = None) -> None:
        """Fill ``out`` (CPU, the tensor's shape, any float dtype) with the tensor ``name``.

        With ``rope_heads`` the rows, ``rope_heads * head_dim`` of them, come out in the model's one
        RoPE layout: the two halves of a head are the pairs' first and second members.
        Raises ModelLoadFailed when the tensor is missing or its shape or type does not fit.
        """

    def load(self, name: str, dtype: torch.dtype, rope_heads: int | None = None) -> torch.Tensor:
        """The tensor ``name`` as a new CPU tensor; see ``read_into``."""

    def group_form(self, name: str) -> GroupForm | None:
        """How the tensor is quantised; None where its values are no scaled integers."""

    def read_groups(self, name: str, rope_heads: int | None = None) -> Groups:
        """All rows of a tensor that has a form, not dequantised; see ``read_into`` for the rest."""

    def each_piece(
        self, name: str, take: TakeRows, *, row_multiple: int, rope_heads: int | None = None
    ) -> None:
        """Call ``take`` with all rows of a tensor that has a form, raw, in pieces.

        Pieces begin at multiples of ``row_multiple`` and come in no order, several at a time.
        """


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face folder and check that it is whole.

    Reads headers only. Raises ModelLoadFailed with one sentence that names path, rule and remedy.
    """
    # Imported here because both formats build on this file.
    from llorch_worker.weights.gguf import GgufCheckpoint
    from llorch_worker.weights.hugging_face import HuggingFaceCheckpoint

    path = Path(path)
    try:
        if path.is_dir():
            return HuggingFaceCheckpoint(path)
        if not path.exists():
            raise ModelLoadFailed(
                f"{path} does not exist; give a .gguf file or a Hugging Face model folder."
            )
        if not path.is_file():  # opening a pipe would wait for ever
            raise ModelLoadFailed(
                f"{path} is no regular file; give a .gguf file or a Hugging Face model folder."
            )
    except OSError as error:
        raise ModelLoadFailed(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions."
        ) from error
    if path.suffix in {".safetensors", ".json"}:
        raise ModelLoadFailed(
            f"{path} is one file of a Hugging Face model; give the folder that holds it."
        )
    if path.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}:
        raise ModelLoadFailed(
            f"{path} is a pickle, which can run code when it is opened; "
            "convert the model to safetensors or GGUF."
        )
    return GgufCheckpoint(path)


def missing_tensor(path: Path, name: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{path} has no tensor {name}, which every Llama needs; convert the model again."
    )


def weights_out_of_range(path: Path, name: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{path}: tensor {name} has weights beyond all measure; the file is damaged, "
        "download or convert it again."
    )


def require_shape(path: Path, info: TensorInfo, expected: tuple[int, ...]) -> None:
    """Raise ModelLoadFailed unless the tensor has the shape that the configuration calls for."""
    if info.shape != expected:
        raise ModelLoadFailed(
            f"{path}: tensor {info.name} is {list(info.shape)} where the model's configuration "
            f"calls for {list(expected)}; weights and configuration do not belong together."
        )
