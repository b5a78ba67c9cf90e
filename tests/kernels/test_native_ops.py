"""Each native operation against its torch twin, and attention of both by its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.cache import CausalMasks
from llorch_worker.kernels import LayerKV, Ops, TorchOps
from llorch_worker.kernels.native.native_ops import NativeOps
from tests.kernels.native import VARIANTS, native_or_skip
from tests.kernels.paged import Scene, scene

TORCH = TorchOps()
DTYPE = torch.bfloat16
# bfloat16 has 8 bits: twins that round at different places may differ in the last one.
TOLERANCE = {"atol": 1e-2, "rtol": 1.6e-2}


@pytest.fixture(scope="module", params=VARIANTS)
def native(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(native_or_skip(request.param))


def randoms(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * spread).to(DTYPE)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("hidden", [16, 100, 2048, 4096])
def test_norms_equal_the_twins(native: NativeOps, tokens: int, hidden: int) -> None:
    torch.manual_seed(tokens * hidden)
    x, residual = randoms(tokens, hidden, spread=30), randoms(tokens, hidden, spread=30)
    weight = randoms(hidden)
    close = {"atol": 0.0, "rtol": 1e-2}
    torch.testing.assert_close(
        native.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5), **close
    )
    expected, expected_sum = TORCH.add_rms_norm(x, residual, weight, 1e-5)
    normed, total = native.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(total, expected_sum)
    torch.testing.assert_close(normed, expected, **close)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("inter", [16, 100, 5632])
def test_silu_and_mul_equals_the_twins(native: NativeOps, tokens: int, inter: int) -> None:
    torch.manual_seed(tokens * inter)
    gate_up = randoms(tokens, 2 * inter, spread=8)
    gate_up[:, :3] = torch.tensor([-1e30, 0.0, 1e30], dtype=DTYPE)
    torch.testing.assert_close(
        native.silu_and_mul(gate_up), TORCH.silu_and_mul(gate_up), atol=1e-5, rtol=1.6e-2
    )


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 1, 32), (32, 4, 64), (6, 6, 128)])
def test_rope_rotates_and_writes_like_the_twin(
    native: NativeOps, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(tokens)
    qkv = randoms(tokens, heads + 2 * kv_heads, head_dim, spread=3)
    angles = torch.rand(tokens, head_dim // 2) * 100
    slots = torch.randperm(16 * 8)[:tokens]
    results = []
    for ops in (TORCH, native):
        heads_in = qkv.clone()
        kv = LayerKV(*(torch.full((8, 16, kv_heads, head_dim), 9.0, dtype=DTYPE) for _ in "kv"))
        ops.rope_and_write(heads_in, angles.cos(), angles.sin(), slots, kv)
        results.append((heads_in, kv.keys, kv.values))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert torch.equal(results[0][2], results[1][2]), "values are copied"


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def ops(request: pytest.FixtureRequest) -> Ops:
    return TORCH if request.param == "torch" else NativeOps(native_or_skip(request.param))


def decode(ops: Ops, made: Scene) -> torch.Tensor:
    out = torch.zeros(len(made.qkv), made.expected().shape[1], dtype=DTYPE)
    ops.paged_decode(made.sequences)(made.qkv, made.kv, out)
    return out


SHAPES = st.sampled_from(
    [(8, 8, 32), (8, 2, 64), (32, 4, 64), (8, 1, 128), (4, 4, 128), (3, 1, 96)]
)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=40), SHAPES, st.integers(0, 99))
def test_decode_of_any_ragged_batch_follows_the_definition(
    ops: Ops, contexts: list[int], shape: tuple[int, int, int], seed: int
) -> None:
    heads, kv_heads, head_dim = shape
    made = scene(
        contexts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=DTYPE, seed=seed
    )
    torch.testing.assert_close(decode(ops, made).double(), made.expected(), **TOLERANCE)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.integers(1, 300).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))),
        min_size=1,
        max_size=5,
    ),
    SHAPES,
    st.integers(0, 99),
)
def test_prefill_of_any_chunks_follows_the_definition(
    ops: Ops, lengths: list[tuple[int, int]], shape: tuple[int, int, int], seed: int
) -> None:
    heads, kv_heads, head_dim = shape
    made = scene(
        [context for _, context in lengths],
        [query for query, _ in lengths],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=DTYPE,
        seed=seed,
    )
    mask = CausalMasks(max_query=8, max_context=512, device=torch.device("cpu"))
    out = torch.zeros(len(made.qkv), heads * head_dim, dtype=DTYPE)
    ops.paged_prefill(made.sequences, mask)(made.qkv, made.kv, out)
    torch.testing.assert_close(out.double(), made.expected(), **TOLERANCE)


def test_decode_is_bit_identical_alone_in_a_batch_and_for_any_number_of_threads(
    native: NativeOps,
) -> None:
    made = scene([5, 1000, 300, 17], heads=32, kv_heads=4, head_dim=64, dtype=DTYPE)
    together = decode(native, made)
    sequences = made.sequences
    alone = type(sequences)(
        first_rows=sequences.first_rows[1:2],
        query_lengths=(1,),
        context_lengths=(1000,),
        block_tables=sequences.block_tables[1:2],
        block_size=sequences.block_size,
    )
    row = sequences.first_rows[1]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out = torch.zeros_like(together)
            native.paged_decode(alone)(made.qkv, made.kv, out)
            assert torch.equal(out[row], together[row])
    finally:
        torch.set_num_threads(threads)
