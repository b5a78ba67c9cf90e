"""Every tensor of model and cache is found, whoever keeps it, and none may be elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from llorch_worker.engine.memory.resident_tensors import resident_tensors, storage_bytes


def test_every_weight_and_cache_tensor_is_found_once(loaded: Any) -> None:
    found = dict(resident_tensors(loaded.model))
    # Tied embeddings are one tensor: bytes are those of the file, and nothing is missing.
    assert storage_bytes(loaded.model) == loaded.model.weight_bytes
    assert len({id(tensor) for tensor in found.values()}) == len(found)
    cache = loaded.cache(8)
    for part, size in cache.bytes_by_part().items():
        assert storage_bytes(getattr(cache, part)) == size


def test_a_tensor_on_another_device_is_named(loaded: Any) -> None:
    with loaded.engine() as engine:
        assert engine.misplaced_tensors() == ()
        rope = engine.cache.rope
        rope.cos = rope.cos.to("meta")
        assert engine.misplaced_tensors() == ("rope.cos on meta",)


def test_the_tensors_of_a_wrapped_model_are_found() -> None:
    class Stand:
        def __init__(self) -> None:
            self.model = [torch.zeros(2), {"more": (torch.zeros(3),)}]

    assert [name for name, _ in resident_tensors(Stand(), "weights")] == [
        "weights.model.0", "weights.model.1.more.0",
    ]  # fmt: skip
