"""Every kernel on emulated processors, beside the same kernel for AVX2 on this processor."""

from __future__ import annotations

import ctypes
import functools
import math
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from llorch_worker.engine_options import KvDtype, Variant
from llorch_worker.kernels import PLAIN, AttentionForm, LayerKV
from llorch_worker.kernels.native import layers
from llorch_worker.kernels.native.native_ops import NativeOps
from llorch_worker.kernels.native.paged_attention import KV_FORMS
from llorch_worker.kernels.native.tiles import BLOCK_COLUMNS, LEVEL_BYTES, Levels, Matrix
from llorch_worker.model.block import Block
from llorch_worker.weights.native_linear import NativeLinear, NativeLinears
from tests.kernels.emulated.emulator import (
    PROCESSORS,
    Architecture,
    Argument,
    Array,
    EmulatedKernels,
    compile_caller,
)
from tests.kernels.native import native_or_skip
from tests.kernels.paged import layer_kv, scene
from tests.model.conftest import Driver
from tests.model.gguf_of import write_gguf_of
from tests.model.test_families import make_reference

THREADS = 2
Bf16 = npt.NDArray[np.uint16]
Call = Callable[..., int]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Architecture], Path]:
    """An architecture's program that calls kernels, compiled when it is first asked for."""

    @functools.cache
    def caller(architecture: Architecture) -> Path:
        return compile_caller(tmp_path_factory.mktemp("caller"), architecture)

    return caller


def on_processor(
    caller: Callable[[Architecture], Path], processor_of: Variant, variant: Variant
) -> EmulatedKernels:
    architecture, processor = PROCESSORS[processor_of]
    if missing := architecture.missing_programs:
        pytest.skip(f"{', '.join(missing)} missing: Debian's qemu-user and GCC for the processor")
    return EmulatedKernels(caller(architecture), architecture, processor, variant)


@pytest.fixture(params=PROCESSORS)
def emulated(request: pytest.FixtureRequest, caller) -> EmulatedKernels:
    return on_processor(caller, request.param, request.param)


def here(name: str, *arguments: Argument, memory: Sequence[Array] = ()) -> int:
    """The kernel for AVX2. Here, ``memory`` is where others point to anyway."""
    passed = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    result = getattr(native_or_skip("avx2"), name)(*passed)
    return 0 if result is None else int(result)


def matrix_of(*parts: Array | None, numbers: Sequence[int]) -> Array:
    """The fields of a ``Matrix``: where its parts are, and its ``numbers``."""
    return np.array([*(0 if each is None else each.ctypes.data for each in parts), *numbers])


def bf16(values: torch.Tensor) -> Bf16:
    return values.bfloat16().contiguous().view(torch.uint16).numpy().copy()


def wide(values: Bf16) -> torch.Tensor:
    return torch.from_numpy(values).view(torch.bfloat16).float()


def close(got: Bf16, expected: Bf16) -> None:
    """Equal but for the last bit of bfloat16, where sums have another order."""
    torch.testing.assert_close(wide(got), wide(expected), rtol=1e-2, atol=1e-5)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_every_variant_for_aarch64_is_tested() -> None:
    assert {name for name in get_args(Variant) if name.startswith("neon")} < set(PROCESSORS)


@pytest.mark.parametrize(("least", "beyond"), [("neon", "neonbf16"), ("avx2", "avx512")])
def test_the_least_variant_needs_nothing_that_its_processor_lacks(
    caller, least: Variant, beyond: Variant
) -> None:
    # The other tests run it there; this one shows that they would notice.
    kernels = on_processor(caller, least, beyond)
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        kernels("silu_and_mul", bf16(torch.ones(3, 64)), bf16(torch.ones(3, 32)), 3, 32, 1)
    assert stopped.value.returncode in (-signal.SIGILL, 128 + signal.SIGILL)


def test_norms(emulated: EmulatedKernels) -> None:
    x, residual = bf16(torch.randn(2, 3, 102) * 30)
    weight = bf16(torch.randn(102))

    def run(call: Call) -> tuple[Bf16, Bf16, Bf16]:
        normed, added, total = np.zeros_like(x), np.zeros_like(x), residual.copy()
        call("rms_norm", x, weight, normed, 3, 102, 1e-5, THREADS)
        call("add_rms_norm", x, total, weight, added, 3, 102, 1e-5, THREADS)
        return normed, added, total

    (normed, added, total), expected = run(emulated), run(here)
    close(normed, expected[0])
    close(added, expected[1])
    assert np.array_equal(total, expected[2])


@pytest.mark.parametrize("gate", ["silu_and_mul", "gelu_and_mul"])
def test_gates(emulated: EmulatedKernels, gate: str) -> None:
    gate_up = torch.randn(3, 2 * 102) * 8
    gate_up[:, :5] = torch.tensor([-1e30, 0.0, 1e30, 90.0, math.nan])

    def run(call: Call) -> Bf16:
        out = np.zeros((3, 102), np.uint16)
        call(gate, bf16(gate_up), out, 3, 102, THREADS)
        return out

    got, expected = wide(run(emulated)), wide(run(here))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def layer_arguments(kv: LayerKV) -> list[Argument]:
    """What the kernels take for a layer's cells, copied."""
    parts = (kv.keys, kv.values, kv.key_scales, kv.value_scales)
    arrays = [None if part is None else part.view(torch.uint8).numpy().copy() for part in parts]
    return [*arrays, KV_FORMS.index(kv.kv_dtype)]


@pytest.mark.parametrize("kv_dtype", KV_FORMS)
def test_rope_and_write(emulated: EmulatedKernels, kv_dtype: KvDtype) -> None:
    qkv, angles = torch.randn(5, 8, 64) * 3, torch.rand(5, 32) * 100
    qkv[1, 4] = 0
    qkv[2, 7, :6] = torch.tensor([500.0, -1e9, 449.0, 0.015, 1e-4, -0.0])
    if kv_dtype != "int8":  # whose scale would not be a number, beside any codes
        qkv[2, 7, 6] = math.nan
    slots = np.array([9, 2, 31, 0, 17])

    def run(call: Call) -> list[npt.NDArray[np.generic]]:
        heads, tables = bf16(qkv), (angles.cos().numpy(), angles.sin().numpy())
        cells = layer_arguments(layer_kv(2, 2, 64, torch.bfloat16, kv_dtype))
        call("rope_and_write", heads, *tables, slots, *cells, 5, 4, 2, 64, THREADS)
        return [heads, *(part for part in cells if isinstance(part, np.ndarray))]

    for got, expected in zip(run(emulated), run(here), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("contexts", "queries", "form"),
    [
        ([5, 700, 64], None, PLAIN),
        ([300, 33], [40, 33], PLAIN),
        ([700, 300], [1, 40], AttentionForm(scale=0.3, window=75, softcap=1.5)),
    ],
    ids=["decode", "prefill", "window and cap"],
)
@pytest.mark.parametrize("kv_dtype", KV_FORMS)
def test_attention_follows_the_definition(
    emulated: EmulatedKernels,
    contexts: list[int],
    queries: list[int] | None,
    form: AttentionForm,
    kv_dtype: KvDtype,
) -> None:
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 96}
    made = scene(contexts, queries, **shape, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    made.forget_before(form.window)
    sequences = made.sequences
    lengths = np.array((sequences.first_rows, sequences.query_lengths, sequences.context_lengths))
    tables = sequences.block_tables.numpy()
    partials = emulated("paged_attention_partials", lengths, len(contexts))
    assert partials == here("paged_attention_partials", lengths, len(contexts))
    out = np.zeros((len(made.qkv), 8 * 96), np.uint16)
    room = np.zeros(partials * 8 * (96 + 2) + 1, np.float32)
    cells = layer_arguments(made.kv)
    sizes = (*tables.shape, sequences.block_size, 8, 2, 96)
    said = (form.scale_for(96), form.window or 0, form.softcap or 0.0)
    failed = emulated(
        "paged_attention",
        bf16(made.qkv),
        *cells,
        out,
        lengths,
        tables,
        room,
        *sizes,
        *said,
        THREADS,
    )
    assert not failed
    torch.testing.assert_close(wide(out).double(), made.expected(form), atol=1e-2, rtol=1.6e-2)


def quantised(
    call: Call,
    rows: tuple[int, ...],
    bits: int,
    group: int,
    zero: int,
    levels: Levels,
    *,
    offsets: bool,
    damaged: bool,
    shared: int = 0,
) -> list[npt.NDArray[np.generic]]:
    """Packed codes and tables, and the products of so many activations with the packed matrix."""
    outputs, tiles = 40, 3  # two and a half tiles
    columns = 96 << shared if levels == "none" else 2 * BLOCK_COLUMNS
    width = columns // (group << shared if levels == "none" else BLOCK_COLUMNS)
    small = columns // BLOCK_COLUMNS * LEVEL_BYTES[levels]
    random = np.random.default_rng(bits * group)
    codes = random.integers(0, 2**bits, (outputs, columns), np.uint8)
    table = random.integers(-63, 64, (2, outputs, width)).astype(np.float32) / 256
    level_bytes = random.integers(0, 256, (outputs, small), np.uint8)
    packed = np.zeros(tiles * 16 * columns * bits // 8, np.uint8)
    scales, shifts = np.zeros((2, tiles * width * 16), np.uint16)
    packed_levels = np.zeros(tiles * small * 16, np.uint8)
    call("pack_codes", codes, packed, outputs, columns, bits, group)
    for values, into in zip(table, (scales, shifts), strict=True):
        call("pack_scales", values, into, outputs, width)
    call("pack_levels", level_bytes, packed_levels, outputs, small)
    parts = (packed, scales, shifts if offsets else None, packed_levels if small else None)
    sizes = (outputs, columns, bits, group, zero, list(LEVEL_BYTES).index(levels), shared)
    products = []
    torch.manual_seed(0)
    for many in rows:
        x = torch.randn(many, columns) * 10
        x[0, :group] = 0
        if damaged:
            x[-1, 5] = math.nan
        out = np.zeros((many, outputs + 5), np.float32)
        work = np.zeros(call("quantised_work_bytes", many, columns, bits, group, THREADS), np.uint8)
        matrix, stride = matrix_of(*parts, numbers=sizes), outputs + 5
        memory = [each for each in parts if each is not None]
        form = (out, stride, 1, work, many, THREADS)
        call("quantised_linear", matrix, bf16(x), *form, memory=memory)
        products.append(out)
    return [packed, scales, shifts, packed_levels, *products]


@pytest.mark.parametrize(
    ("bits", "group", "zero", "levels", "offsets"),
    [
        (4, 32, 8, "none", False),
        (8, 32, 128, "none", False),
        (8, 32, 0, "none", True),
        (4, 16, 0, "nibble", True),
        (4, 16, 4, "byte", False),
        (4, 32, 0, "six_bit", True),
        (8, 32, 0, "six_bit", True),
        (8, 16, 32, "byte", False),
    ],
    ids=["Q4_0", "Q8_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
)
def test_quantised_products_have_the_same_bits(
    emulated: EmulatedKernels, bits: int, group: int, zero: int, levels: Levels, offsets: bool
) -> None:
    form = ((1, 11), bits, group, zero, levels)
    made = [quantised(call, *form, offsets=offsets, damaged=False) for call in (emulated, here)]
    for got, expected in zip(*made, strict=True):
        assert np.array_equal(got, expected)
    assert all(product.any() for product in made[0][-2:])


@pytest.mark.parametrize(("bits", "zero", "shared"), [(4, 8, 2), (8, 16, 1)])
def test_scales_of_larger_groups_are_those_of_each_group_of_theirs(
    emulated: EmulatedKernels, bits: int, zero: int, shared: int
) -> None:
    form = ((1, 11), bits, 32, zero, "none")
    made = [
        quantised(call, *form, offsets=False, damaged=False, shared=shared)
        for call in (emulated, here)
    ]
    for got, expected in zip(*made, strict=True):
        assert np.array_equal(got, expected)
    assert all(product.any() for product in made[0][-2:])


def test_a_row_that_is_not_a_number_stays_one(emulated: EmulatedKernels) -> None:
    *_, out = quantised(emulated, (3,), 8, 32, 128, "none", offsets=False, damaged=True)
    assert np.isnan(out[2, :40]).all()
    assert np.isfinite(out[:2]).all()


@pytest.mark.parametrize(
    ("code_bytes", "flip", "shared"),
    [(16, 0, 0), (16, 0, 1), (32, 0x80, 0)],
    ids=["Q4_0", "Q4_0 of 64", "Q8_0"],
)
def test_packed_blocks(emulated: EmulatedKernels, code_bytes: int, flip: int, shared: int) -> None:
    random = np.random.default_rng(1)
    rows = random.integers(0, 64, (21, 4 * (2 + code_bytes)), np.uint8)
    order = random.permutation(21)

    def run(call: Call) -> list[npt.NDArray[np.generic]]:
        tiles, scales = np.ones(32 * 4 * code_bytes, np.uint8), np.ones(32 * 4, np.uint16)
        numbers = (21, 4, code_bytes, flip, shared)
        assert call("pack_blocks", rows, order, tiles, scales, *numbers) == 1
        assert (scales[32 * 4 >> shared :] == 1).all()
        return [tiles, scales]

    for got, expected in zip(run(emulated), run(here), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("rows", [1, 6])
def test_bfloat16_products(emulated: EmulatedKernels, rows: int) -> None:
    x, weights = bf16(torch.randn(rows, 70)), bf16(torch.randn(144, 70))

    def run(call: Call) -> tuple[Bf16, npt.NDArray[np.float32]]:
        tiles, work = weights.copy(), np.zeros(THREADS * 16 * 70, np.uint16)
        call("pack_bf16", tiles, work, 9, 70, THREADS)
        out = np.zeros((rows, 140), np.float32)
        matrix = matrix_of(tiles, None, None, None, numbers=(140, 70, 16, 0, 0, 0, 0))
        call("bf16_linear", matrix, x, out, 140, 1, rows, THREADS, memory=[tiles])
        return tiles, out

    (tiles, out), (expected_tiles, expected) = run(emulated), run(here)
    assert np.array_equal(tiles, expected_tiles)
    torch.testing.assert_close(
        torch.from_numpy(out), torch.from_numpy(expected), rtol=1e-4, atol=1e-4
    )


def test_truncation(emulated: EmulatedKernels) -> None:
    values = torch.randn(3, 1003) * 3
    limits = (
        np.array([-4.0, -math.inf, -math.inf], np.float32),
        np.array([1003, 17, 400]),
        np.array([1.0, 1.0, 0.7]),
    )

    def run(call: Call) -> npt.NDArray[np.float32]:
        weights = values.softmax(-1).numpy().copy()
        work = np.zeros(call("truncate_rows_work_bytes", 1003, THREADS), np.uint8)
        call("truncate_rows", weights, values.numpy(), None, *limits, work, 3, 1003, THREADS)
        return weights

    got = run(emulated)
    assert np.array_equal(got, run(here))
    assert (got > 0).sum(-1)[1] == 17


def array_at(address: int | None, size_bytes: int, dtype: type = np.uint8) -> Array:
    memory = (ctypes.c_uint8 * size_bytes).from_address(int(address or 0))
    return np.frombuffer(memory, np.uint8).view(dtype)


def table_at(address: int | None, table: Any, count: int = 1) -> Array:
    return array_at(address, count * ctypes.sizeof(table), np.int64)


class Emulation:
    """Runs a model's layers on an emulated processor, with copies of all that the tables reach."""

    def __init__(self, call: EmulatedKernels, driver: Driver) -> None:
        self._call, self._driver = call, driver

    def __call__(self, model: int, step: int, threads: int) -> int:
        native, steps = layers.LayersTable, layers.StepTable
        at, now = native.from_address(model), steps.from_address(step)
        owners = [each for block in self._driver.model.blocks for each in weights_of(block)]
        owners += [t for kv in self._driver.cache.kv.layers for t in (kv.keys, kv.values)]
        memory = [t.view(torch.uint8).numpy() for t in owners]
        memory += [table_at(at.layers, layers.Layer, at.count)]
        for layer in (layers.Layer * at.count).from_address(at.layers):
            for each in (layer.qkv, layer.output, layer.gate_up, layer.down):
                memory.append(table_at(each.pieces, Matrix, each.count))
        state = 2 * now.rows * at.hidden
        memory += [array_at(now.residual, state), array_at(now.added, state)]
        memory += [table_at(now.cells, layers.Cells, at.count)]
        memory += [table_at(now.views, layers.View, now.view_count)]
        angles, slots = array_at(now.angles, 16, np.int64), array_at(now.slots, 8, np.int64)
        memory += [angles, *(array_at(each, 2 * now.rows * at.head_dim) for each in angles)]
        memory += [slots, array_at(slots[0], 8 * now.rows)]
        sequences = (layers.Sequences * now.sequence_count).from_address(now.sequences)
        memory += [table_at(now.sequences, layers.Sequences, now.sequence_count)]
        for part in sequences:
            memory.append(array_at(part.lengths, 24 * part.count))
            memory.append(array_at(part.tables, 8 * part.count * part.table_stride))
        tables = table_at(model, native), table_at(step, steps)
        kept = [array.copy() for array in (*tables, *memory) if array.dtype == np.int64]
        failed = self._call("run_layers", *tables, threads, memory=memory)
        # Pointers of the other process have come back.
        changed = [array for array in (*tables, *memory) if array.dtype == np.int64]
        for array, before in zip(changed, kept, strict=True):
            array[...] = before
        return failed


def weights_of(block: Block) -> Iterator[torch.Tensor]:
    for linear in (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down):
        assert isinstance(linear, NativeLinear)
        for piece in linear.pieces:
            for part in vars(piece).values():
                if isinstance(part, torch.Tensor):
                    yield part
    for branch in (block.around_attention, block.around_mlp):
        assert branch.before is not None
        yield branch.before.weight


def test_layers_in_one_call(emulated: EmulatedKernels, tmp_path: Path) -> None:
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "BF16", "Q6_K")]
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    reference = make_reference("llama", **shape, num_hidden_layers=2)
    path = write_gguf_of(reference, tmp_path / "m.gguf", kinds)
    native = native_or_skip("avx2")
    logits = []
    for on_emulator in (True, False):
        options = {"ops": NativeOps(native), "linears": NativeLinears(native), "num_blocks": 4}
        driver = Driver.open(path, dtype=torch.bfloat16, **options)
        assert driver.model.native is not None
        if on_emulator:
            driver.model.native._run = Emulation(emulated, driver)
        steps = ({"a": [3, 5, 7]}, {"a": [4], "b": [9, 1]})
        logits.append(torch.cat([driver.step(step, all_logits=True) for step in steps]))
    got, expected = logits
    if emulated.variant == "avx2":
        assert torch.equal(got, expected)
    assert (got - expected).norm() < 0.03 * expected.norm()
