"""What the GPU benchmark draws at random, and its arithmetic of bytes and operations."""

from __future__ import annotations

import pytest
import torch

from benches.gpu.random_model import LLAMA_2_7B
from benches.gpu.random_weights import NAMES
from llorch_worker.bench.instruments.model_costs import decode_flops, prefill_flops
from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.model import RaggedBatch
from tests.benches.tiny_llama import CPU, TINY, tiny_llama


@pytest.mark.parametrize("weights", NAMES)
def test_a_random_model_computes_and_counts_its_bytes(weights: str) -> None:
    model = tiny_llama(weights)
    shape = cache_shape(TINY, 32, dtype=torch.float32, device=CPU)
    cache = UnifiedCache.allocate(shape, 2)
    row = torch.arange(3)
    places = (Places(torch.tensor([[0, 1]]).int(), row),)
    batch = RaggedBatch(row, row, (3,), (3,), places, row[2:])
    logits = model.forward(batch, cache)
    assert logits.shape == (1, 50)
    assert bool(logits.isfinite().all())
    norms_and_embedding = (2 * len(model.blocks) + 1) * 32 * 4 + 50 * 32 * 4
    assert model.matrix_bytes == model.weight_bytes - norms_and_embedding


def test_the_operations_of_7b_are_those_known() -> None:
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000)
    assert decode_flops(LLAMA_2_7B, 1, 1000) == weights + 4 * 32 * 4096 * 1000
    # A prompt attends to half of itself.
    short, long = (prefill_flops(LLAMA_2_7B, t) for t in (1000, 2000))
    attention = 4 * 32 * 4096 * (2000 * 2001 // 2 - 2 * (1000 * 1001 // 2))
    assert long - 2 * short == attention - 2 * 4096 * 32000
