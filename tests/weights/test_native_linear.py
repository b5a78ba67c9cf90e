"""Matrices in tiles, against the same matrices dequantised and multiplied in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.kernels.native.compiler import NativeUnavailable
from llorch_worker.kernels.native.library import native_library
from llorch_worker.weights import FusedWeight, Part
from llorch_worker.weights.gguf import GgufCheckpoint
from llorch_worker.weights.groups import group_form
from llorch_worker.weights.native_linear import NativeLinears

QUANTISED = [type_ for type_ in GGMLQuantizationType if group_form(type_) is not None]
WriteGguf = Callable[..., Path]


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    try:
        native_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """One row's error may be three times the usual one, where its offsets nearly cancel."""
    torch.manual_seed(0)


def random_rows(type_: GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Raw blocks whose scales are of a size that models have."""
    block, block_bytes = GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    for start in _half_floats(type_):
        halves = rng.uniform(1e-4, 1e-2, (len(raw), 1)).astype(np.float16)
        raw[:, start : start + 2] = halves.view(np.uint8)
    return raw.reshape(rows, -1)


def _half_floats(type_: GGMLQuantizationType) -> tuple[int, ...]:
    """Where a block of the type holds float16 numbers."""
    return {
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
    }.get(type_.name, (0,))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.fixture
def weight_file(tmp_path: Path, write_gguf: WriteGguf) -> Callable[..., GgufCheckpoint]:
    def write(**tensors: tuple[np.ndarray, GGMLQuantizationType]) -> GgufCheckpoint:
        return GgufCheckpoint(write_gguf(tmp_path / "weights.gguf", tensors=tensors))

    return write


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 40])
@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_a_quantised_matrix_multiplies_as_its_dequantised_twin(type_, tokens, weight_file):
    rows, columns = 72, 512  # four and a half tiles
    raw = random_rows(type_, rows, columns, seed=tokens)
    checkpoint = weight_file(w=(raw, type_))
    x = torch.randn(tokens, columns).bfloat16()

    linear = NativeLinears().load(checkpoint, FusedWeight((Part("w", (rows, columns)),)))

    expected = x.double() @ torch.from_numpy(dequantize(raw, type_)).double().T
    # Activations are rounded to 8 bits; beside that, only the result's own rounding.
    assert relative_error(linear(x, wide=True), expected) < 0.01
    assert relative_error(linear(x), expected) < 0.012
    assert linear(x).dtype == torch.bfloat16


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_activations_of_eight_bits_multiply_exactly(type_, weight_file):
    rows, columns = 32, 256
    raw = random_rows(type_, rows, columns, seed=1)
    checkpoint = weight_file(w=(raw, type_))
    x = torch.randint(-127, 128, (5, columns)).float()
    x[:, ::16] = 127  # the largest of each group: rounding to 8 bits changes nothing

    linear = NativeLinears().load(checkpoint, FusedWeight((Part("w", (rows, columns)),)))

    expected = x.double() @ torch.from_numpy(dequantize(raw, type_)).double().T
    # What is left: scales of K types are kept with 11 bits.
    exact = group_form(type_).exact_in_half
    assert relative_error(linear(x.bfloat16(), wide=True), expected) < (2e-6 if exact else 5e-4)


@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (16, 32), (31, 34), (48, 256), (72, 512)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 33])
def test_a_plain_matrix_multiplies_as_in_float64(rows, columns, tokens, weight_file):
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float16)
    checkpoint = weight_file(w=(values.view(np.uint8), GGMLQuantizationType.F16))
    x = torch.randn(tokens, columns).bfloat16()

    linear = NativeLinears().load(checkpoint, FusedWeight((Part("w", (rows, columns)),)))

    expected = x.double() @ torch.from_numpy(values).bfloat16().double().T
    assert relative_error(linear(x, wide=True), expected) < 1e-6


@pytest.mark.parametrize("type_", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.F16])
def test_a_step_without_logits_multiplies_no_rows(type_, weight_file):
    raw = random_rows(GGMLQuantizationType.Q4_0, 40, 64, seed=0)
    if type_ is GGMLQuantizationType.F16:
        raw = np.ones((40, 64), np.float16).view(np.uint8)
    linear = NativeLinears().load(weight_file(w=(raw, type_)), FusedWeight((Part("w", (40, 64)),)))
    assert linear(torch.empty(0, 64).bfloat16(), wide=True).shape == (0, 40)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_activations_that_are_not_finite_give_no_finite_results(type_, value, weight_file):
    raw = random_rows(type_, 40, 256, seed=0)
    checkpoint = weight_file(w=(raw, type_))
    linear = NativeLinears().load(checkpoint, FusedWeight((Part("w", (40, 256)),)))
    for column in range(0, 256, 15):
        x = torch.randn(2, 256).bfloat16()
        x[1, column] = value
        out = linear(x, wide=True)
        assert out[0].isfinite().all()
        assert not out[1].isfinite().any()


def test_parts_of_different_types_stand_side_by_side_as_rows(weight_file):
    parts = {
        "q": (random_rows(GGMLQuantizationType.Q4_K, 40, 256, 0), GGMLQuantizationType.Q4_K),
        "k": (random_rows(GGMLQuantizationType.Q4_K, 24, 256, 1), GGMLQuantizationType.Q4_K),
        "v": (random_rows(GGMLQuantizationType.Q6_K, 24, 256, 2), GGMLQuantizationType.Q6_K),
    }
    checkpoint = weight_file(**parts)
    weight = FusedWeight(tuple(Part(n, (len(raw), 256)) for n, (raw, _) in parts.items()))
    x = torch.randn(3, 256).bfloat16()

    linears = NativeLinears()
    linear = linears.load(checkpoint, weight)

    whole = np.concatenate([dequantize(raw, type_) for raw, type_ in parts.values()])
    expected = x.double() @ torch.from_numpy(whole).double().T
    assert relative_error(linear(x, wide=True), expected) < 0.01
    assert linear.weight_bytes == linears.weight_bytes(checkpoint, weight)


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_bytes_are_foretold_and_near_those_of_the_file(type_, weight_file):
    raw = random_rows(type_, 256, 512, seed=0)
    checkpoint = weight_file(w=(raw, type_))
    weight = FusedWeight((Part("w", (256, 512)),))

    linears = NativeLinears()

    kept = linears.load(checkpoint, weight).weight_bytes
    assert kept == linears.weight_bytes(checkpoint, weight)
    assert kept < 2.3 * raw.nbytes  # codes of 2, 3, 5 and 6 bits take 4 or 8


def test_a_row_is_the_same_alone_and_in_company(weight_file):
    raw = random_rows(GGMLQuantizationType.Q4_0, 64, 256, seed=0)
    checkpoint = weight_file(w=(raw, GGMLQuantizationType.Q4_0))
    linear = NativeLinears().load(checkpoint, FusedWeight((Part("w", (64, 256)),)))
    x = torch.randn(37, 256).bfloat16()

    together = linear(x, wide=True)

    for row in range(len(x)):
        assert torch.equal(linear(x[row : row + 1], wide=True)[0], together[row])


@pytest.mark.parametrize(
    ("type_", "at", "scale"),
    [
        (GGMLQuantizationType.Q6_K, 208, 60000),
        (GGMLQuantizationType.Q4_0, 0, np.inf),
        (GGMLQuantizationType.Q8_0, 34, np.nan),
    ],
)
def test_scales_beyond_what_is_kept_are_refused(weight_file, type_, at, scale):
    raw = random_rows(type_, 16, 256, seed=0)
    raw[3, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    checkpoint = weight_file(w=(raw, type_))
    with pytest.raises(ModelLoadFailed, match="tensor w has weights that are out of range"):
        NativeLinears().load(checkpoint, FusedWeight((Part("w", (16, 256)),)))
