"""Quantised GGUF matrices as a card keeps them, multiplied by the torch twin of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.kernels.quantised_matrix import quantised_linear
from llorch_worker.weights import DenseLinear, FusedWeight, Part, select_linears
from llorch_worker.weights.gguf import GgufCheckpoint
from llorch_worker.weights.groups import group_form
from llorch_worker.weights.quantised_linear import QuantisedLinears

QUANTISED = [type_ for type_ in GGMLQuantizationType if group_form(type_) is not None]
LINEARS = QuantisedLinears(torch.device("cpu"), torch.bfloat16, quantised_linear)


@pytest.fixture
def checkpoint(tmp_path: Path, write_gguf: Callable[..., Path]) -> Callable[..., GgufCheckpoint]:
    def write(**tensors: tuple[np.ndarray, GGMLQuantizationType]) -> GgufCheckpoint:
        return GgufCheckpoint(write_gguf(tmp_path / "weights.gguf", tensors=tensors))

    return write


def random_rows(type_: GGMLQuantizationType, rows: int, columns: int = 512) -> np.ndarray:
    """Raw blocks whose scales are of a size that models have."""
    block, block_bytes = GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(rows)
    raw = rng.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82)}
    halves |= {"Q3_K": (108,), "Q6_K": (208,)}
    for start in halves.get(type_.name, (0,)):
        values = rng.uniform(1e-4, 1e-2, (len(raw), 1)).astype(np.float16)
        raw[:, start : start + 2] = values.view(np.uint8)
    return raw.reshape(rows, -1)


def weight(**rows: int) -> FusedWeight:
    return FusedWeight(tuple(Part(name, (count, 512)) for name, count in rows.items()))


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_every_type_multiplies_as_its_dequantised_matrix_in_the_bytes_foretold(type_, checkpoint):
    raw = random_rows(type_, 24)
    file = checkpoint(w=(raw, type_))
    linear = LINEARS.load(file, weight(w=24))
    assert linear.weight_bytes == LINEARS.weight_bytes(file, weight(w=24))
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if type_.name not in ("Q2_K", "Q3_K"):  # whose codes are kept in four bits
        assert linear.weight_bytes <= 1.12 * (24 * 512 // block * block_bytes)

    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() @ torch.from_numpy(dequantize(raw, type_)).double().T
    # Where scales are products of two numbers, float16 rounds them: 2^-12 at the most.
    error = (linear(x, wide=True).double() - expected).norm() / expected.norm()
    assert float(error) < 3e-4
    assert linear(x).dtype is torch.bfloat16


def test_parts_of_several_types_make_one_layer(checkpoint):
    types = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "dense": "F32"}
    raws = {
        name: random_rows(GGMLQuantizationType[type_], rows)
        for (name, type_), rows in zip(list(types.items())[:3], (8, 4, 12), strict=True)
    }
    raws["dense"] = np.random.default_rng(0).normal(size=(5, 512)).astype(np.float32)
    file = checkpoint(
        **{name: (raws[name], GGMLQuantizationType[type_]) for name, type_ in types.items()}
    )
    whole = weight(q=8, k=4, v=12, dense=5)
    linear = LINEARS.load(file, whole)
    assert linear.weight_bytes == LINEARS.weight_bytes(file, whole)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.cat(
        [
            x.double() @ torch.from_numpy(dequantize(raws[n], GGMLQuantizationType[t])).double().T
            for n, t in types.items()
        ],
        dim=1,
    )
    got = linear(x, wide=True).double()
    for columns in (slice(0, 12), slice(12, 24), slice(24, 29)):
        error = (got - expected)[:, columns].norm() / expected[:, columns].norm()
        assert float(error) < 4e-3


def test_a_matrix_that_is_not_quantised_is_dense(checkpoint):
    values = np.ones((4, 512), np.float32)
    file = checkpoint(w=(values, GGMLQuantizationType.F32))
    linear = LINEARS.load(file, weight(w=4))
    assert isinstance(linear, DenseLinear)
    assert linear.weight_bytes == LINEARS.weight_bytes(file, weight(w=4)) == 4 * 512 * 2


def test_weights_beyond_all_measure_are_refused(checkpoint):
    raw = random_rows(GGMLQuantizationType.Q4_0, 2)
    raw[:, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ModelLoadFailed, match="tensor w has weights that are out of range"):
        LINEARS.load(checkpoint(w=(raw, GGMLQuantizationType.Q4_0)), weight(w=2))


def test_cuda_keeps_quantised_matrices_but_not_for_the_exact_reference():
    pytest.importorskip("triton")
    cuda = torch.device("cuda:0")
    assert isinstance(select_linears(cuda, torch.bfloat16), QuantisedLinears)
    assert not isinstance(select_linears(cuda, torch.float32), QuantisedLinears)
    assert not isinstance(select_linears(cuda, torch.bfloat16, "torch"), QuantisedLinears)
