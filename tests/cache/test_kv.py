from __future__ import annotations

import torch

from llorch_worker.cache import PagedKV


def make() -> PagedKV:
    return PagedKV(
        num_layers=2,
        num_blocks=3,
        block_size=4,
        num_kv_heads=2,
        head_dim=6,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_what_is_written_at_slots_is_gathered_from_them() -> None:
    kv = make()
    slots = torch.tensor([9, 0, 5])
    keys, values = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    kv.write(1, slots, keys, values)
    got_keys, got_values = kv.gather(1, slots)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    assert torch.equal(kv.keys[1, 2, 1], keys[0])  # slot 9 is block 2, offset 1
    assert torch.equal(kv.values[1, 1, 1], values[2])


def test_a_write_touches_one_layer_and_its_slots_only() -> None:
    kv = make()
    kv.write(0, torch.tensor([7]), torch.ones(1, 2, 6), torch.ones(1, 2, 6))
    assert kv.keys.sum() == kv.values.sum() == 12
    assert (kv.keys[0, 1, 3] == 1).all()


def test_it_counts_its_bytes() -> None:
    assert make().nbytes == 2 * 2 * 3 * 4 * 2 * 6 * 4
