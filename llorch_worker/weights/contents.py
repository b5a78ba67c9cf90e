"""A summary of a checkpoint's contents, from its headers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from llorch_worker.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class TensorType:
    """How many tensors of one stored type there are, and their bytes in the file."""

    name: str
    tensors: int
    stored_bytes: int


def tensor_types(checkpoint: Checkpoint) -> tuple[TensorType, ...]:
    """The stored types, the one with most tensors first."""
    tensors, stored = Counter[str](), Counter[str]()
    for tensor in checkpoint.tensors.values():
        tensors[tensor.dtype_name] += 1
        stored[tensor.dtype_name] += tensor.stored_bytes
    return tuple(TensorType(name, n, stored[name]) for name, n in tensors.most_common())


def stored_numbers(checkpoint: Checkpoint) -> int:
    """The number of values in all tensors."""
    return sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())


def file_bytes(checkpoint: Checkpoint) -> int:
    """Size of the files that hold the tensors."""
    return sum(file.stat().st_size for file in checkpoint.files)
