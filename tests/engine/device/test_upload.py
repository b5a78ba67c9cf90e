"""A step's arrays arrive as they are, wherever they go."""

from __future__ import annotations

import numpy as np
import torch

from llorch_worker.engine.device.upload import pack, unpack, upload

ARRAYS = [
    np.arange(5),
    np.zeros(0, np.int64),
    np.arange(6).reshape(2, 3) - 3,
    np.array([2**40]),
    np.arange(8).reshape(2, 4)[:, :3],
]


def test_one_row_gives_all_arrays_back_at_aligned_places() -> None:
    whole = pack(ARRAYS, pinned=False)
    views = unpack(whole, ARRAYS)
    for view, array in zip(views, ARRAYS, strict=True):
        assert torch.equal(view, torch.from_numpy(array.copy()))
        assert (view.data_ptr() - whole.data_ptr()) % 16 == 0 or not view.numel()


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    (tensor,) = upload([array], torch.device("cpu"))
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]


def test_elsewhere_shapes_and_dtype_stay() -> None:
    tensors = upload(ARRAYS, torch.device("meta"))
    assert [tuple(t.shape) for t in tensors] == [a.shape for a in ARRAYS]
    assert {t.dtype for t in tensors} == {torch.int64}
