"""A row's result has the same bits in every batch, in decode and in prefill."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.nn.functional as F

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import PLAIN, AttentionForm, tiled_attention
from llorch_worker.kernels.fixed_linear import fixed_linear
from llorch_worker.kernels.interface import Ops
from llorch_worker.kernels.invariant_ops import InvariantOps
from llorch_worker.kernels.native.native_ops import NativeOps
from llorch_worker.kernels.quantised_matrix import QuantisedMatrix
from llorch_worker.kernels.triton import TritonOps, attention_work
from llorch_worker.kernels.triton.quantised_linear import quantised_linear
from tests.kernels.interpreter import DEVICE, INTERPRETED
from tests.kernels.native import native_or_skip
from tests.kernels.paged import Scene, scene
from tests.kernels.test_attention import NoMask
from tests.sizes import sized


def make_ops(name: str) -> Ops:
    if name == "native":
        if not INTERPRETED:
            pytest.skip("tensors are on a card")
        return NativeOps(native_or_skip())
    return InvariantOps() if name == "torch" else TritonOps(processors=16, batch_invariant=True)


def attended(
    ops: Ops, made: Scene, form: AttentionForm, spans: list[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """Attention of one batch: tokens [first, end) of each of some sequences, by number.

    Decodes and chunks are two calls, as in a forward pass.
    """
    out = made.zeros()
    rows = []
    for decode in (True, False):
        chosen = [span for span in spans if (span[2] - span[1] == 1) is decode]
        if not chosen:
            continue
        sequences = replace(
            made.sequences,
            first_rows=tuple(made.sequences.first_rows[i] + first for i, first, _ in chosen),
            query_lengths=tuple(end - first for _, first, end in chosen),
            context_lengths=tuple(end for _, _, end in chosen),
            block_tables=made.sequences.block_tables[[i for i, _, _ in chosen]],
        )
        attend = ops.paged_decode(sequences) if decode else ops.paged_prefill(sequences, NoMask())
        attend(made.qkv, made.kv, out, form)
    for i, first, end in spans:
        start = made.sequences.first_rows[i]
        rows.append(out[start + first : start + end].clone())
    return rows


KINDS: list[tuple[str, torch.dtype, KvDtype]] = [
    ("torch", torch.float32, "auto"),
    ("torch", torch.bfloat16, "auto"),
    ("torch", torch.float32, "int8"),
    ("triton", torch.float32, "auto"),
    ("triton", torch.bfloat16, "auto"),
    ("native", torch.bfloat16, "auto"),
    ("native", torch.bfloat16, "fp8"),
    ("native", torch.bfloat16, "int8"),
]


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "form"),
    [(4, 2, PLAIN), (3, 3, PLAIN), (4, 2, AttentionForm(window=75, softcap=1.5))],
    ids=["grouped", "ungrouped", "window and cap"],
)
def test_a_tokens_attention_is_the_same_in_every_batch(
    name: str,
    dtype: torch.dtype,
    kv_dtype: KvDtype,
    heads: int,
    kv_heads: int,
    form: AttentionForm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some contexts have several pieces, some longer ones, and some no room for theirs.
    monkeypatch.setattr(attention_work, "PIECE", 32)
    monkeypatch.setattr(attention_work, "MOST_PIECES", 3)
    monkeypatch.setattr(attention_work, "MOST_SLOTS", 4)
    ops = make_ops(name)
    lengths = (600, 70, 16, 1, 259) if name != "triton" else (150, 70, 16, 1)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": 32}
    made = scene(lengths, lengths, **shape, dtype=dtype, kv_dtype=kv_dtype)
    whole = [attended(ops, made, form, [(i, 0, length)])[0] for i, length in enumerate(lengths)]
    rng = Random(0)
    for _ in range(sized(usual=4, full=12)):
        spans = []
        for i in rng.sample(range(len(lengths)), rng.randint(1, len(lengths))):
            end = rng.randint(1, lengths[i])
            spans.append((i, rng.choice([end - 1, rng.randrange(end)]), end))
        for (i, first, end), rows in zip(spans, attended(ops, made, form, spans), strict=True):
            assert torch.equal(rows, whole[i][first:end])


@pytest.mark.parametrize("form", [PLAIN, AttentionForm(window=200)], ids=["plain", "window"])
def test_no_bit_depends_on_how_many_tiles_share_a_call(
    form: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (900, 70, 320, 1, 259)
    spans = [(0, 500, 900), (1, 69, 70), (2, 319, 320), (3, 0, 1), (4, 100, 259)]
    made = scene(lengths, lengths, heads=4, kv_heads=2, head_dim=32, dtype=torch.float32)
    expected = attended(InvariantOps(), made, form, spans)
    for keys in (64, 700, 2000):
        monkeypatch.setattr(tiled_attention, "KEYS_AT_ONCE", keys)
        for rows, each in zip(attended(InvariantOps(), made, form, spans), expected, strict=True):
            assert torch.equal(rows, each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "outputs"), [(64, 172), (172, 64), (2048, 300)])
def test_a_row_of_a_product_is_the_same_in_every_batch(
    dtype: torch.dtype, columns: int, outputs: int
) -> None:
    weight = torch.randn(outputs, columns, device=DEVICE).to(dtype)
    x = torch.randn(150, columns, device=DEVICE).to(dtype)
    whole = fixed_linear(x, weight)
    torch.testing.assert_close(whole, F.linear(x, weight), rtol=2e-2, atol=2e-2 * columns**0.5)
    for first, end in ((0, 1), (149, 150), (7, 9), (3, 36), (10, 138)):
        assert torch.equal(fixed_linear(x[first:end], weight), whole[first:end])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_of_a_quantised_product_is_the_same_in_every_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (37, 608), generator=generator, dtype=torch.uint8).to(DEVICE)
    scales = torch.rand(37, 608 // 32, generator=generator).to(DEVICE)
    matrix = QuantisedMatrix.pack(codes, scales, None, bits=4, zero=8, factor=1.0)
    x = torch.randn(70, 608, generator=generator).to(DEVICE, dtype)

    def product(first: int, end: int) -> torch.Tensor:
        out = torch.zeros(end - first, 37, dtype=dtype, device=DEVICE)
        quantised_linear(x[first:end], matrix, out, 0, batch_invariant=True)
        return out

    whole = product(0, 70)
    for first, end in ((0, 1), (69, 70), (7, 9), (3, 36)):
        assert torch.equal(product(first, end), whole[first:end])


@pytest.mark.parametrize("name", ["torch", "native", "triton"])
@pytest.mark.parametrize("inter", [172, 5632])
def test_a_row_between_the_products_is_the_same_in_every_batch(name: str, inter: int) -> None:
    ops = make_ops(name)
    dtype = torch.float32 if name == "torch" else torch.bfloat16
    x = torch.randn(40, 2 * inter, device=DEVICE).to(dtype)
    weight = torch.randn(2 * inter, device=DEVICE).to(dtype)
    gated, normed = ops.silu_and_mul(x), ops.rms_norm(x, weight, 1e-5)
    bent = ops.gelu_and_mul(x)
    for first, end in ((0, 1), (39, 40), (3, 9)):
        rows = x[first:end].clone()
        assert torch.equal(ops.silu_and_mul(rows), gated[first:end])
        assert torch.equal(ops.gelu_and_mul(rows), bent[first:end])
        assert torch.equal(ops.rms_norm(rows, weight, 1e-5), normed[first:end])
