"""RoPE on the queries and keys of one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benches.components import reference
from benches.components.sizes import HEAD_DIM, HEADS, ROPE_THETA, check, randoms
from llorch_worker.cache import Rope, RopeTables
from llorch_worker.kernels.torch_ops import apply_rope


@pytest.mark.parametrize("tokens", [1, 8, 32, 128])
@pytest.mark.benchmark(group="rope_forward")
def test_rope_forward(benchmark: Any, dtype: torch.dtype, tokens: int) -> None:
    ropes = (Rope(ROPE_THETA),)
    tables = RopeTables(ropes, head_dim=HEAD_DIM, max_context=256, device=torch.device("cpu"))
    x = randoms(tokens, 2 * HEADS, HEAD_DIM, dtype=dtype)
    positions = torch.arange(100, 100 + tokens)
    ((cos, sin),) = tables.at(positions)
    check(apply_rope(x, cos, sin), reference.rope(x, positions), dtype)
    benchmark(apply_rope, x, cos, sin)
