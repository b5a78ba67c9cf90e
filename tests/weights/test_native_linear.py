"""Matrices in tiles, against the same matrices dequantised and multiplied in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.kernels.native.library import NativeKernels
from llorch_worker.weights import FusedWeight, Part
from llorch_worker.weights.groups import group_form
from llorch_worker.weights.native_linear import NativeLinears
from tests.kernels.native import native_or_skip, runnable_variants, variant_params
from tests.weights.quantised import QUANTISED, random_rows

MANY = 139
"""Rows for which AMX multiplies quantised weights too, in pieces of 16 and 11."""


@pytest.fixture(scope="module", params=variant_params())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native_or_skip(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The error of a row whose offsets nearly cancel may be three times the usual one."""
    torch.manual_seed(0)


@pytest.fixture
def threads() -> Iterator[None]:
    """A test may change torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def loaded(kernels, weight_file, raw, type_, rows, columns):
    checkpoint = weight_file(w=(raw, type_))
    return NativeLinears(kernels).load(checkpoint, FusedWeight((Part("w", (rows, columns)),)))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_a_quantised_matrix_multiplies_like_its_dequantised_twin(kernels, type_, weight_file):
    rows, columns = 72, 512  # four and a half tiles
    raw = random_rows(type_, rows, columns, seed=1)
    checkpoint = weight_file(w=(raw, type_))
    weight = FusedWeight((Part("w", (rows, columns)),))
    linears = NativeLinears(kernels)

    linear = linears.load(checkpoint, weight)

    assert linear.weight_bytes == linears.weight_bytes(checkpoint, weight)
    # Codes of 2, 3, 5 and 6 bits take 4 or 8, and five tiles have 80 rows.
    assert linear.weight_bytes < 2.3 * raw.nbytes * 80 / rows
    for tokens in (1, 2, 7, 16, 17, 40, MANY):
        x = torch.randn(tokens, columns).bfloat16()
        expected = x.double() @ torch.from_numpy(dequantize(raw, type_)).double().T
        # Activations are rounded to 8 bits, the result once more.
        assert relative_error(linear(x, wide=True), expected) < 0.01, tokens
        assert relative_error(linear(x), expected) < 0.012, tokens
    assert linear(x).dtype == torch.bfloat16


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_all_variants_multiply_a_quantised_matrix_to_the_same_bits(type_, weight_file):
    rows, columns = 72, 512
    checkpoint = weight_file(w=(random_rows(type_, rows, columns, seed=1), type_))
    weight = FusedWeight((Part("w", (rows, columns)),))
    layers = [
        NativeLinears(native_or_skip(variant)).load(checkpoint, weight)
        for variant in runnable_variants()
    ]
    for tokens in (1, 5, 23, MANY):
        x = (torch.randn(tokens, columns) * 10).bfloat16()
        x[0, :32] = 0
        products = [layer(x, wide=True) for layer in layers]
        for product in products:
            assert torch.equal(product, products[0])


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_activations_that_fit_eight_bits_multiply_exactly(kernels, type_, weight_file):
    rows, columns = 32, 256
    raw = random_rows(type_, rows, columns, seed=1)
    x = torch.randint(-127, 128, (5, columns)).float()
    x[:, ::16] = 127  # the largest of each group: rounding to 8 bits changes nothing
    linear = loaded(kernels, weight_file, raw, type_, rows, columns)

    expected = x.double() @ torch.from_numpy(dequantize(raw, type_)).double().T
    # What multiplies the offsets of K types is rounded to 16 bits.
    form = group_form(type_)
    rounded = form.has_offsets and form.levels != "none"
    assert relative_error(linear(x.bfloat16(), wide=True), expected) < (2e-5 if rounded else 2e-6)


@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (16, 32), (31, 34), (48, 256), (300, 512)])
def test_a_plain_matrix_multiplies_like_in_float64(kernels, rows, columns, weight_file):
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float16)
    linear = loaded(
        kernels, weight_file, values.view(np.uint8), GGMLQuantizationType.F16, rows, columns
    )

    for tokens in (1, 3, 8, 9, 33, MANY):
        x = torch.randn(tokens, columns).bfloat16()
        expected = x.double() @ torch.from_numpy(values).bfloat16().double().T
        assert relative_error(linear(x, wide=True), expected) < 1e-6, tokens


@pytest.mark.parametrize("type_", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.F16])
def test_a_step_without_logits_multiplies_no_rows(kernels, type_, weight_file):
    raw = random_rows(GGMLQuantizationType.Q4_0, 40, 64, seed=0)
    if type_ is GGMLQuantizationType.F16:
        raw = np.ones((40, 64), np.float16).view(np.uint8)
    linear = NativeLinears(kernels).load(
        weight_file(w=(raw, type_)), FusedWeight((Part("w", (40, 64)),))
    )
    assert linear(torch.empty(0, 64).bfloat16(), wide=True).shape == (0, 40)


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_infinite_or_nan_activations_make_their_row_nan(kernels, type_, weight_file):
    raw = random_rows(type_, 40, 256, seed=0)
    linear = loaded(kernels, weight_file, raw, type_, 40, 256)
    values = itertools.cycle((torch.nan, torch.inf, -torch.inf))
    for tokens in (2, MANY):
        for column, value in zip(range(0, 256, 5), values, strict=False):
            x = torch.randn(tokens, 256).bfloat16()
            x[1, column] = value
            out = linear(x, wide=True)
            assert out[1].isnan().all()
            out[1] = 0
            assert out.isfinite().all()


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_activations_too_small_for_a_scale_count_as_0(kernels, type_, weight_file):
    raw = random_rows(type_, 40, 256, seed=0)
    linear = loaded(kernels, weight_file, raw, type_, 40, 256)
    x = torch.randn(2, 256).bfloat16()
    x[1] = 0
    for value in (9e-35, 1e-36, -1e-38, 1e-39):
        x[1, 5] = value
        out = linear(x, wide=True)
        assert out[0].any()
        assert not out[1].any(), value


def test_parts_of_different_types_become_rows_of_one_layer(kernels, weight_file):
    parts = {
        "q": (random_rows(GGMLQuantizationType.Q4_K, 40, 256, 0), GGMLQuantizationType.Q4_K),
        "k": (random_rows(GGMLQuantizationType.Q4_K, 24, 256, 1), GGMLQuantizationType.Q4_K),
        "v": (random_rows(GGMLQuantizationType.Q6_K, 24, 256, 2), GGMLQuantizationType.Q6_K),
    }
    checkpoint = weight_file(**parts)
    weight = FusedWeight(tuple(Part(n, (len(raw), 256)) for n, (raw, _) in parts.items()))
    x = torch.randn(3, 256).bfloat16()

    linears = NativeLinears(kernels)
    linear = linears.load(checkpoint, weight)

    whole = np.concatenate([dequantize(raw, type_) for raw, type_ in parts.values()])
    expected = x.double() @ torch.from_numpy(whole).double().T
    assert relative_error(linear(x, wide=True), expected) < 0.01
    assert linear.weight_bytes == linears.weight_bytes(checkpoint, weight)


@pytest.mark.parametrize("outputs", [1, 15, 33, 50, 64, 200])
@pytest.mark.parametrize("type_", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.BF16])
def test_a_row_is_the_same_alone_in_company_and_for_any_number_of_threads(
    kernels, type_, outputs, weight_file, threads
):
    raw = torch.randn(outputs, 256).bfloat16().view(torch.uint8).numpy()
    if type_ is not GGMLQuantizationType.BF16:
        raw = random_rows(type_, outputs, 256, seed=0)
    linear = loaded(kernels, weight_file, raw, type_, outputs, 256)
    x = (torch.randn(MANY, 256) * 10).bfloat16()
    torch.set_num_threads(1)
    alone = torch.cat([linear(row[None], wide=True) for row in x])

    for count in (1, 3):
        torch.set_num_threads(count)
        for first, tokens in [*((5, tokens) for tokens in range(1, 41)), (0, MANY), (1, MANY - 1)]:
            together = linear(x[first : first + tokens], wide=True)
            assert torch.equal(together, alone[first : first + tokens])


@pytest.mark.parametrize(
    ("type_", "at", "scale"),
    [
        (GGMLQuantizationType.Q6_K, 208, np.inf),
        (GGMLQuantizationType.Q4_K, 2, -np.inf),
        (GGMLQuantizationType.Q4_0, 0, np.inf),
        (GGMLQuantizationType.Q8_0, 34, np.nan),
    ],
)
def test_infinite_or_nan_scales_are_refused(kernels, weight_file, type_, at, scale):
    raw = random_rows(type_, 16, 256, seed=0)
    raw[3, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    checkpoint = weight_file(w=(raw, type_))
    with pytest.raises(ModelLoadFailed, match="tensor w has weights that are out of range"):
        NativeLinears(kernels).load(checkpoint, FusedWeight((Part("w", (16, 256)),)))
