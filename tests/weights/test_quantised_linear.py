"""Quantised GGUF matrices in a card's layout, multiplied by the torch twin of its kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.kernels.quantised_matrix import quantised_linear
from llorch_worker.weights import DenseLinear, FusedWeight, Part, select_linears
from llorch_worker.weights.quantised_linear import QuantisedLinears
from tests.weights.quantised import QUANTISED, random_rows

LINEARS = QuantisedLinears(torch.device("cpu"), torch.bfloat16, quantised_linear)


def weight(**rows: int) -> FusedWeight:
    return FusedWeight(tuple(Part(name, (count, 512)) for name, count in rows.items()))


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_every_type_multiplies_like_its_dequantised_matrix_in_the_predicted_bytes(
    type_, weight_file
):
    raw = random_rows(type_, 32)
    file = weight_file(w=(raw, type_))
    linear = LINEARS.load(file, weight(w=32))
    assert linear.weight_bytes == LINEARS.weight_bytes(file, weight(w=32))
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if type_.name not in ("Q2_K", "Q3_K"):  # whose codes are kept in four bits
        assert linear.weight_bytes <= 1.12 * (32 * 512 // block * block_bytes)

    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() @ torch.from_numpy(dequantize(raw, type_)).double().T
    # Scales that are products of two numbers are rounded to float16: by 2^-12 at most.
    error = (linear(x, wide=True).double() - expected).norm() / expected.norm()
    assert float(error) < 3e-4
    assert linear(x).dtype is torch.bfloat16


def test_parts_of_several_types_make_one_layer(weight_file):
    types = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "dense": "F32"}
    raws = {
        name: random_rows(GGMLQuantizationType[type_], rows)
        for (name, type_), rows in zip(list(types.items())[:3], (8, 4, 12), strict=True)
    }
    raws["dense"] = np.random.default_rng(0).normal(size=(5, 512)).astype(np.float32)
    file = weight_file(
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


def test_a_matrix_that_is_not_quantised_is_dense(weight_file):
    values = np.ones((4, 512), np.float32)
    file = weight_file(w=(values, GGMLQuantizationType.F32))
    linear = LINEARS.load(file, weight(w=4))
    assert isinstance(linear, DenseLinear)
    assert linear.weight_bytes == LINEARS.weight_bytes(file, weight(w=4)) == 4 * 512 * 2


def test_infinite_weights_are_refused(weight_file):
    raw = random_rows(GGMLQuantizationType.Q4_0, 2)
    raw[:, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ModelLoadFailed, match="tensor w has weights that are out of range"):
        LINEARS.load(weight_file(w=(raw, GGMLQuantizationType.Q4_0)), weight(w=2))


def test_cuda_keeps_matrices_quantised_except_for_the_exact_reference():
    pytest.importorskip("triton")
    cuda = torch.device("cuda:0")
    assert isinstance(select_linears(cuda, torch.bfloat16), QuantisedLinears)
    assert not isinstance(select_linears(cuda, torch.float32), QuantisedLinears)
    assert not isinstance(select_linears(cuda, torch.bfloat16, "torch"), QuantisedLinears)
