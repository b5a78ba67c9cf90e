"""Each native operation against its torch twin, and attention of both by its definition."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.cache import CausalMasks
from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import PLAIN, AttentionForm, LayerKV, Ops, TorchOps
from llorch_worker.kernels.native.native_ops import NativeOps
from tests.kernels.native import native_or_skip, variant_params
from tests.kernels.paged import Scene, layer_kv, scene

TORCH = TorchOps()
DTYPE = torch.bfloat16
# bfloat16 has 8 bits: twins that round at different places may differ in the last one.
TOLERANCE = {"atol": 1e-2, "rtol": 1.6e-2}
KV_DTYPES = get_args(KvDtype)


@pytest.fixture(scope="module", params=variant_params())
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
def test_gates_equal_the_twins(native: NativeOps, tokens: int, inter: int) -> None:
    torch.manual_seed(tokens * inter)
    gate_up = randoms(tokens, 2 * inter, spread=8)
    gate_up[:, :3] = torch.tensor([-1e30, 0.0, 1e30], dtype=DTYPE)
    for name in ("silu_and_mul", "gelu_and_mul"):
        got, expected = (getattr(ops, name)(gate_up) for ops in (native, TORCH))
        # Where GELU is nearly 0, the twin's 1 + tanh(x) has lost its digits.
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1.6e-2)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 1, 32), (32, 4, 64), (6, 6, 128)])
def test_rope_rotates_and_writes_like_the_twin(
    native: NativeOps, tokens: int, heads: int, kv_heads: int, head_dim: int, kv_dtype: KvDtype
) -> None:
    torch.manual_seed(tokens)
    qkv = randoms(tokens, heads + 2 * kv_heads, head_dim, spread=3)
    angles = torch.rand(tokens, head_dim // 2) * 100
    slots = torch.randperm(16 * 8)[:tokens]
    results = []
    for ops in (TORCH, native):
        heads_in = qkv.clone()
        kv = layer_kv(8, kv_heads, head_dim, DTYPE, kv_dtype)
        ops.rope_and_write(heads_in, angles.cos(), angles.sin(), slots, kv)
        results.append((heads_in, kv))
    (expected, _), (rotated, kv) = results
    torch.testing.assert_close(rotated, expected, **TOLERANCE)
    # The twin stores what the kernel has rotated: the cells have the same bits, and no others are
    # written.
    stored = layer_kv(8, kv_heads, head_dim, DTYPE, kv_dtype)
    stored.write(slots, rotated[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])
    assert_same_cells(kv, stored)


def assert_same_cells(one: LayerKV, other: LayerKV) -> None:
    for part in fields(LayerKV):
        a, b = (getattr(kv, part.name) for kv in (one, other))
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), part.name


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_every_number_is_stored_like_the_twin_stores_it(
    native: NativeOps, kv_dtype: KvDtype
) -> None:
    """All numbers of bfloat16 up to 1,000: ties, numbers below the least step, out of range."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    every = bits.view(DTYPE)
    rows = torch.where(every.abs() < 1000, every, 0).view(-1, 1, 64)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    tokens = len(rows)
    still = torch.zeros(tokens, 32)
    slots = torch.arange(tokens)
    kv, expected = (layer_kv(tokens // 16, 1, 64, DTYPE, kv_dtype) for _ in range(2))
    qkv = torch.cat([rows] * 3, dim=1)
    native.rope_and_write(qkv, still.cos(), still, slots, kv)
    expected.write(slots, qkv[:, 1:2], rows)
    assert_same_cells(kv, expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_number_that_is_not_finite_reaches_every_token_that_sees_it(
    native: NativeOps, kv_dtype: KvDtype, part: str
) -> None:
    """So that the engine finds its blocks; the sequence beside it has none of them."""
    made = scene([70, 70], heads=4, kv_heads=2, head_dim=64, dtype=DTYPE, kv_dtype=kv_dtype)
    slot = made.sequences.block_tables[0, 1].long() * 16 + 3
    damaged = torch.full((1, 2, 64), math.nan, dtype=DTYPE)
    k, v = made.kv.gather(slot[None], DTYPE)
    made.kv.write(slot[None], *((damaged, v) if part == "key" else (k, damaged)))
    out = decode(native, made)
    first, second = made.sequences.first_rows
    assert out[first].isnan().all()
    assert out[second].isfinite().all()


@pytest.fixture(scope="module", params=["torch", *variant_params()])
def ops(request: pytest.FixtureRequest) -> Ops:
    return TORCH if request.param == "torch" else NativeOps(native_or_skip(request.param))


def decode(ops: Ops, made: Scene, form: AttentionForm = PLAIN) -> torch.Tensor:
    out = made.zeros()
    ops.paged_decode(made.sequences)(made.qkv, made.kv, out, form)
    return out


def assert_follows_definition(
    out: torch.Tensor, made: Scene, ops: Ops, form: AttentionForm
) -> None:
    # torch's rounds what a code stands for.
    expected = made.expected(form, exact=isinstance(ops, NativeOps))
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)


SHAPES = st.sampled_from(
    [(8, 8, 32), (8, 2, 64), (32, 4, 64), (8, 1, 128), (4, 4, 128), (3, 1, 96)]
)

FORMS = st.one_of(
    st.just(PLAIN),
    st.builds(
        AttentionForm,
        scale=st.sampled_from([None, 0.3]),
        window=st.one_of(st.none(), st.integers(1, 400)),
        softcap=st.sampled_from([None, 1.5]),
    ),
)


def scene_of(
    contexts: list[int],
    queries: list[int] | None,
    shape: tuple[int, int, int],
    kv_dtype: KvDtype,
    seed: int = 0,
) -> Scene:
    sizes = dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
    return scene(contexts, queries, **sizes, dtype=DTYPE, kv_dtype=kv_dtype, seed=seed)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=40),
    SHAPES,
    st.sampled_from(KV_DTYPES),
    FORMS,
    st.integers(0, 99),
)
def test_decode_of_any_ragged_batch_follows_the_definition(
    ops: Ops,
    contexts: list[int],
    shape: tuple[int, int, int],
    kv_dtype: KvDtype,
    form: AttentionForm,
    seed: int,
) -> None:
    made = scene_of(contexts, None, shape, kv_dtype, seed)
    made.forget_before(form.window)
    assert_follows_definition(decode(ops, made, form), made, ops, form)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.integers(1, 300).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))),
        min_size=1,
        max_size=5,
    ),
    SHAPES,
    st.sampled_from(KV_DTYPES),
    FORMS,
    st.integers(0, 99),
)
def test_prefill_of_any_chunks_follows_the_definition(
    ops: Ops,
    lengths: list[tuple[int, int]],
    shape: tuple[int, int, int],
    kv_dtype: KvDtype,
    form: AttentionForm,
    seed: int,
) -> None:
    queries, contexts = map(list, zip(*lengths, strict=True))
    made = scene_of(contexts, queries, shape, kv_dtype, seed)
    made.forget_before(form.window)
    rows = 8 if ops.reads_mask else 0
    mask = CausalMasks(max_query=rows, max_context=512, device=torch.device("cpu"))
    out = made.zeros()
    ops.paged_prefill(made.sequences, mask)(made.qkv, made.kv, out, form)
    assert_follows_definition(out, made, ops, form)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_decode_is_bit_identical_alone_in_a_batch_and_for_any_number_of_threads(
    native: NativeOps, kv_dtype: KvDtype
) -> None:
    made = scene_of([5, 1000, 300, 17], None, (32, 4, 64), kv_dtype)
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
            native.paged_decode(alone)(made.qkv, made.kv, out, PLAIN)
            assert torch.equal(out[row], together[row])
    finally:
        torch.set_num_threads(threads)
