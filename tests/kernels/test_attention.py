"""Paged attention of the Triton kernels and their torch twins, against its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import PLAIN, AttentionForm, TorchOps
from llorch_worker.kernels.interface import Ops
from llorch_worker.kernels.invariant_ops import InvariantOps
from llorch_worker.kernels.triton import TritonOps
from llorch_worker.kernels.triton.paged_decode import splits_for
from tests.kernels.interpreter import DEVICE
from tests.kernels.paged import Scene, scene
from tests.sizes import sized

OPS = [TorchOps(), InvariantOps(), TritonOps(processors=1), TritonOps(processors=16)]
OPS.append(TritonOps(processors=16, batch_invariant=True))
"""With few processors, one program per sequence and KV head; with many, the context is split."""
IDS = ["torch", "torch-invariant", "triton", "triton-split", "triton-invariant"]
KV_DTYPES = get_args(KvDtype)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def cases(*shapes: tuple[int, int, int]) -> list[tuple[torch.dtype, tuple[int, int, int]]]:
    """Each dtype with the first shape and each shape in float32; in full size, all with all."""
    some = [(dtype, shapes[0]) for dtype in TOLERANCE]
    some += [(torch.float32, shape) for shape in shapes[1:]]
    return sized(usual=some, full=[(dtype, shape) for dtype in TOLERANCE for shape in shapes])


class NoMask:
    """A causal mask built on demand."""

    max_query = 1024

    def view(self, query_len: int, context_len: int) -> torch.Tensor:
        whole = torch.ones(query_len, context_len, dtype=torch.bool, device=DEVICE)
        return whole.tril_(context_len - query_len)


def decoded(ops: Ops, made: Scene, form: AttentionForm = PLAIN) -> torch.Tensor:
    out = made.zeros()
    ops.paged_decode(made.sequences)(made.qkv, made.kv, out, form)
    return out


def prefilled(ops: Ops, made: Scene, form: AttentionForm = PLAIN) -> torch.Tensor:
    out = made.zeros()
    ops.paged_prefill(made.sequences, NoMask())(made.qkv, made.kv, out, form)
    return out


def assert_close(got: torch.Tensor, made: Scene, form: AttentionForm = PLAIN) -> None:
    atol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), made.expected(form), rtol=atol, atol=atol)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
@pytest.mark.parametrize(
    ("dtype", "shape"), cases((8, 1, 64), (2, 2, 64), (8, 2, 128), (3, 1, 8), (2, 1, 96))
)
def test_decode_attends_to_the_whole_context(ops, dtype, shape):
    heads, kv_heads, head_dim = shape
    made = scene((1, 16, 129, 70), heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert_close(decoded(ops, made), made)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_reads_quantised_caches(ops, dtype, kv_dtype: KvDtype):
    made = scene((5, 90), heads=4, kv_heads=2, head_dim=32, dtype=dtype, kv_dtype=kv_dtype)
    assert_close(decoded(ops, made), made)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
def test_decode_takes_its_contexts_from_the_device(ops):
    """A recorded launch is replayed with other contexts; the host's lengths are upper bounds."""
    made = scene((3, 70), heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    bounds = replace(
        made,
        sequences=replace(
            made.sequences,
            context_lengths=(96, 96),
            device_contexts=torch.tensor(made.contexts, device=DEVICE),
        ),
    )
    for form in (PLAIN, AttentionForm(window=21)):
        assert_close(decoded(ops, bounds, form), made, form)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
@pytest.mark.parametrize(("dtype", "shape"), cases((8, 2, 32), (2, 2, 64), (4, 1, 8), (2, 1, 96)))
def test_prefill_is_causal_in_every_chunk(ops, dtype, shape):
    heads, kv_heads, head_dim = shape
    made = scene(
        (5, 40, 83, 33),
        (5, 3, 70, 1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    assert_close(prefilled(ops, made), made)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_prefill_reads_quantised_caches(ops, kv_dtype: KvDtype):
    made = scene(
        (20, 50), (20, 7), heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, kv_dtype=kv_dtype
    )
    assert_close(prefilled(ops, made), made)


FORMS = {
    "one token": AttentionForm(window=1),
    "window": AttentionForm(window=21),
    "cap": AttentionForm(softcap=1.5, scale=0.4),
    "both": AttentionForm(softcap=1.5, scale=0.4, window=70),
    "wider than contexts": AttentionForm(window=200),
}
"""Windows that are no multiple of a block or a tile, and that contexts cross several times."""
FORMED = sized(
    usual=[*(("both", kv_dtype) for kv_dtype in KV_DTYPES), ("one token", "auto")],
    full=[(name, kv_dtype) for name in FORMS for kv_dtype in KV_DTYPES],
)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
@pytest.mark.parametrize(("name", "kv_dtype"), FORMED)
def test_attention_has_the_form_of_its_layer(ops, name: str, kv_dtype: KvDtype):
    """Blocks outside the windows may be another sequence's by now: they hold NaN."""
    form = FORMS[name]
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    dtype = torch.bfloat16 if kv_dtype == "fp8" else torch.float32
    for queries in (None, (5, 3, 1, 40)):
        made = scene((5, 70, 33, 90), queries, **shape, dtype=dtype, kv_dtype=kv_dtype)
        made.forget_before(form.window)
        assert_close((prefilled if queries else decoded)(ops, made, form), made, form)


@pytest.mark.parametrize("ops", OPS, ids=IDS)
def test_lengths_and_rows_go_to_a_card_through_pinned_memory(ops, monkeypatch):
    """From pageable memory the host would wait for what the card is computing."""
    plain = torch.tensor
    decodes = scene((5, 40), heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
    chunks = scene((5, 40), (5, 3), heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)

    def only_pinned(values, *, dtype, pin_memory):
        assert pin_memory == (DEVICE.type == "cuda")
        return plain(values, dtype=dtype, pin_memory=pin_memory)

    monkeypatch.setattr(torch, "tensor", only_pinned)
    decoded(ops, decodes)
    prefilled(ops, chunks)


def test_decode_is_split_at_batch_1_but_not_in_large_batches():
    assert splits_for(1, 32, 132) == 16
    assert splits_for(1, 8, 132) == 64
    assert splits_for(256, 32, 132) == 1
