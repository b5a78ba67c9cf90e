from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from llorch_worker.cache import Rope, RopeTables
from llorch_worker.kernels.torch_ops import apply_rope

HEAD_DIM = 64


@pytest.fixture(scope="module")
def tables() -> RopeTables:
    return RopeTables((Rope(1e4),), head_dim=HEAD_DIM, max_context=2048, device=torch.device("cpu"))


def test_rope_agrees_with_transformers_within_1e_5(tables: RopeTables) -> None:
    positions = torch.tensor([0, 1, 5, 2047, 1000, 3])
    q, k = torch.randn(6, 8, HEAD_DIM), torch.randn(6, 2, HEAD_DIM)
    ((cos, sin),) = tables.at(positions)
    # transformers: [batch, heads, tokens, head_dim], and both halves of the table.
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        torch.cat((cos, cos), -1)[None],
        torch.cat((sin, sin), -1)[None],
    )
    torch.testing.assert_close(
        apply_rope(q, cos, sin), expected_q[0].transpose(0, 1), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        apply_rope(k, cos, sin), expected_k[0].transpose(0, 1), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_is_rotated_in_float32(tables: RopeTables, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, HEAD_DIM).to(dtype)
    ((cos, sin),) = tables.at(torch.tensor([3, 900, 2000]))
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, apply_rope(x.float(), cos, sin).to(dtype))
