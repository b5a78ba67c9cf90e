"""Each Triton kernel against its torch twin, interpreted if there is no CUDA."""

from __future__ import annotations

import pytest
import torch

from llorch_worker.kernels import TorchOps
from llorch_worker.kernels.triton import TritonOps
from tests.kernels.interpreter import DEVICE

TRITON = TritonOps(processors=16)
TORCH = TorchOps()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative; one rounding more or less in each dtype."""


def randoms(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    rtol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (5, 48), (3, 320)])
def test_rms_norm_equals_the_twin(tokens, hidden, dtype):
    x, weight = randoms(tokens, hidden, dtype=dtype), randoms(hidden, dtype=dtype, seed=1)
    assert_close(TRITON.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_and_the_sum(dtype):
    x, residual = randoms(4, 80, dtype=dtype), randoms(4, 80, dtype=dtype, seed=1)
    weight = randoms(80, dtype=dtype, seed=2)
    expected = TORCH.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    normed, total = TRITON.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(normed, expected[0])
    assert torch.equal(total, expected[1])


def test_rows_may_be_strided():
    wide = randoms(4, 96, dtype=torch.float32)
    x, weight = wide[:, :48], randoms(48, dtype=torch.float32, seed=1)
    assert_close(TRITON.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [24, 1500])
def test_gates_equal_the_twins(inner, dtype):
    gate_up = randoms(3, 2 * inner, dtype=dtype) * 4
    assert_close(TRITON.silu_and_mul(gate_up), TORCH.silu_and_mul(gate_up))
    assert_close(TRITON.gelu_and_mul(gate_up), TORCH.gelu_and_mul(gate_up))
