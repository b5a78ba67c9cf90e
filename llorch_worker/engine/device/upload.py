"""A step's arrays to the device, in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.int64]

_ALIGNED = 2
"""Numbers in 16 bytes, which kernels load at once: each array begins at a multiple of them."""


def upload(arrays: Sequence[Integers], device: torch.device) -> list[torch.Tensor]:
    """``arrays`` as int64 tensors on ``device``; on the CPU they share the arrays' memory.

    Elsewhere they are views of one tensor: a copy costs the host about as much as launching a
    kernel does, whatever its size, and from pinned memory it waits for nothing.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays]
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[Integers], *, pinned: bool) -> torch.Tensor:
    """All numbers in one row, each array at an aligned place."""
    whole = torch.zeros(sum(map(_room, arrays)), dtype=torch.int64, device="cpu", pin_memory=pinned)
    row, at = whole.numpy(), 0
    for array in arrays:
        row[at : at + array.size] = array.ravel()
        at += _room(array)
    return whole


def unpack(whole: torch.Tensor, arrays: Sequence[Integers]) -> list[torch.Tensor]:
    """The views of what ``pack`` made of ``arrays``, in their shapes."""
    views, at = [], 0
    for array in arrays:
        views.append(whole[at : at + array.size].view(array.shape))
        at += _room(array)
    return views


def _room(array: Integers) -> int:
    return -(-array.size // _ALIGNED) * _ALIGNED
