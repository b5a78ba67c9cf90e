"""Paged attention of the Triton kernels and their torch twins, against its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import (
    PLAIN,
    AttentionForm,
    AttentionRoom,
    PagedSequences,
    TorchOps,
)
from llorch_worker.kernels.interface import Ops
from llorch_worker.kernels.invariant_ops import InvariantOps
from llorch_worker.kernels.triton import TritonOps, attention_work
from llorch_worker.kernels.triton.attention_tiles import AttentionTiles
from tests.kernels.interpreter import DEVICE
from tests.kernels.paged import Scene, scene
from tests.sizes import sized

OPS = [TorchOps(), InvariantOps(), TritonOps(processors=1), TritonOps(processors=16)]
OPS.append(TritonOps(processors=16, batch_invariant=True))
"""With many processors, prefill divides more contexts."""
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
    made = torch.Tensor.to
    decodes = scene((5, 40), heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
    chunks = scene((5, 40), (5, 3), heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)

    def only_pinned(values, *target, **options):
        assert not values.is_cpu or values.is_pinned() == (DEVICE.type == "cuda")
        return made(values, *target, **options)

    monkeypatch.setattr(torch.Tensor, "to", only_pinned)
    decoded(ops, decodes)
    prefilled(ops, chunks)


BENT = AttentionForm(window=100, softcap=1.5)
SHAPES = sized(
    usual=[(4, 1, 64, PLAIN), (3, 1, 128, BENT), (8, 1, 96, BENT), (1, 1, 256, PLAIN)],
    full=[
        (group, kv_heads, head_dim, form)
        for group in (1, 2, 3, 4, 5, 7, 8)
        for kv_heads in (1, 2)
        for head_dim in (64, 96, 128, 256)
        for form in (PLAIN, BENT)
    ],
)
"""Query heads a KV head, KV heads, numbers a head, form."""
LONG = (64, 65, 130, 290, 1)


@pytest.fixture
def short_pieces(monkeypatch) -> None:
    """Pieces of 64 tokens that double beyond 4, and room for only 9 of them."""
    monkeypatch.setattr(attention_work, "PIECE", 64)
    monkeypatch.setattr(attention_work, "MOST_PIECES", 4)
    monkeypatch.setattr(attention_work, "MOST_SLOTS", 9)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("ops", OPS[3:], ids=IDS[3:])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_joins_the_pieces_of_long_contexts(ops, shape):
    group, kv_heads, head_dim, form = shape
    sizes = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    made = scene(LONG, **sizes, dtype=torch.float32)
    assert_close(decoded(ops, made, form), made, form)
    # Short chunks after long prefixes, as of drafts, and a long one.
    made = scene(LONG, (1, 4, 2, 70, 1), **sizes, dtype=torch.float32)
    assert_close(prefilled(ops, made, form), made, form)


def test_a_context_of_several_real_pieces_is_read_to_its_end():
    made = scene((1100, 513), heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    assert_close(decoded(OPS[2], made), made)


def test_a_recording_has_room_for_the_longest_contexts_and_reads_what_there_is(monkeypatch):
    """Its grid is a card's, however many pieces its rows could have."""
    ops = TritonOps(processors=1)
    made = scene((3, 700), heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
    bounds = replace(
        made.sequences,
        context_lengths=(10**6, 10**6),
        device_contexts=torch.tensor(made.contexts, device=DEVICE),
    )
    work = attention_work.decode_work(bounds, AttentionTiles.of(torch.float32, 16, 2, 1, 0), 0)
    assert work.items == 2 * attention_work.MOST_PIECES
    assert int(work.list[0, 0]) == 3
    assert_close(decoded(ops, replace(made, sequences=bounds)), made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_divides_contexts_where_there_are_few_tiles(dtype):
    """A draft of 4 tokens after 100,000 occupies a card of 132 processors."""
    tiles = AttentionTiles.of(dtype, 128, 4, 4, 232_448)
    sequences = PagedSequences(
        (0,), (4,), (100_000,), torch.zeros(1, 6250, dtype=torch.int32, device=DEVICE), 16
    )
    alone = attention_work.prefill_work(sequences, tiles, 0, 4 * 132 // 8)
    assert 60 <= alone.items <= 70
    ends = alone.list[1:, 6] - alone.list[1:, 5]
    assert int(ends.sum()) == 100_000
    many = replace(sequences, first_rows=(0,) * 400, query_lengths=(4,) * 400)
    many = replace(many, context_lengths=(100_000,) * 400)
    assert attention_work.prefill_work(many, tiles, 0, 4 * 132 // 8).slots == 0


@pytest.mark.parametrize(("contexts", "queries"), [((1300, 90, 1300), None), ((3000,), (6,))])
def test_what_waits_to_be_joined_is_planned(monkeypatch, contexts, queries):
    ops = TritonOps(processors=16)
    made = scene(contexts, queries, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    taken = []
    empty = torch.empty

    def counted(*sizes, **options):
        made = empty(*sizes, **options)
        if options.get("dtype") is torch.float32:
            taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    (decoded if queries is None else prefilled)(ops, made)
    room = AttentionRoom(
        heads=4, kv_heads=2, head_dim=16, dtype=torch.float32,
        max_context=max(contexts), max_sequences=len(contexts), max_step_tokens=64,
    )  # fmt: skip
    assert 0 < sum(taken) <= ops.attention_bytes(room)


def test_the_parts_of_a_full_card_are_bounded():
    room = AttentionRoom(
        heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
        max_context=131_072, max_sequences=256, max_step_tokens=8192,
    )  # fmt: skip
    taken = TritonOps(processors=132).attention_bytes(room)
    assert 130 * 2**20 < taken < 140 * 2**20 < room.gathered_bytes
