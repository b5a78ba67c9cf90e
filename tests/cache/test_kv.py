from __future__ import annotations

import torch

from llorch_worker.cache import CacheShape, PagedKV, Rope


def make() -> PagedKV:
    shape = CacheShape(
        num_layers=2,
        num_kv_heads=2,
        head_dim=6,
        ropes=(Rope(1e4),),
        max_context=12,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return PagedKV(shape, [3])


def test_a_layer_is_a_view_of_the_whole() -> None:
    kv = make()
    keys, values = kv.layers[1].keys, kv.layers[1].values
    assert keys.shape == values.shape == (3, 4, 2, 6)
    keys[2, 1] = 1
    values[0, 3] = 2
    assert (kv.groups[0].keys[1, 2, 1] == 1).all()
    assert (kv.groups[0].values[1, 0, 3] == 2).all()
    assert kv.groups[0].keys.sum() == 12
    assert kv.groups[0].values.sum() == 24
