from __future__ import annotations

import torch

from llorch_worker.cache import RopeTables
from llorch_worker.model.qkv_projection import QkvProjection
from llorch_worker.model.rope import apply_rope
from llorch_worker.weights import DenseLinear

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 6, 2, 8


def test_one_matrix_gives_what_three_would() -> None:
    torch.manual_seed(0)
    q_weight = torch.randn(HEADS * HEAD_DIM, HIDDEN)
    k_weight = torch.randn(KV_HEADS * HEAD_DIM, HIDDEN)
    v_weight = torch.randn(KV_HEADS * HEAD_DIM, HIDDEN)
    projection = QkvProjection(
        DenseLinear(torch.cat((q_weight, k_weight, v_weight))),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )
    tables = RopeTables(
        head_dim=HEAD_DIM, theta=1e4, scaling=None, max_context=64, device=torch.device("cpu")
    )
    cos, sin = tables.at(torch.tensor([4, 0, 63, 7, 7]))
    x = torch.randn(5, HIDDEN)
    q, k, v = projection(x, cos, sin)
    expected_q = apply_rope((x @ q_weight.T).view(5, HEADS, HEAD_DIM), cos, sin)
    expected_k = apply_rope((x @ k_weight.T).view(5, KV_HEADS, HEAD_DIM), cos, sin)
    torch.testing.assert_close(q, expected_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k, expected_k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        v, (x @ v_weight.T).view(5, KV_HEADS, HEAD_DIM), atol=1e-5, rtol=1e-5
    )
