"""What a step sends to a card arrives as it was, in one copy."""

from __future__ import annotations

import numpy as np
import torch

from llorch_worker.engine.runner import pack, unpack


def test_arrays_of_any_width_and_shape_travel_in_one_aligned_tensor() -> None:
    arrays = [
        np.arange(5),
        np.array([7, -1, 2**31 - 1], np.int32),
        np.arange(0),
        np.arange(6).reshape(3, 2).T,
        np.array([3], np.int32),
        np.array([2**62]),
    ]
    sent = unpack(pack(arrays, pinned=False), arrays)
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.dtype is torch.from_numpy(array).dtype
        assert tensor.tolist() == array.tolist()
        assert tensor.data_ptr() % 16 == 0, "kernels load 16 bytes at once"
