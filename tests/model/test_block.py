from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from llorch_worker.kernels import TorchOps
from llorch_worker.model.block import GatedMlp, RmsNorm
from llorch_worker.weights import DenseLinear


@pytest.mark.parametrize("hidden", [1, 64, 4096])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_agrees_with_transformers_within_1e_5(hidden: int, scale: float) -> None:
    torch.manual_seed(0)
    reference = LlamaRMSNorm(hidden, eps=1e-5)
    reference.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(7, hidden) * scale
    with torch.no_grad():
        expected = reference(x)
    actual = RmsNorm(reference.weight.data, 1e-5, TorchOps())(x)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_averages_narrow_input_in_float32_like_transformers(dtype: torch.dtype) -> None:
    reference = LlamaRMSNorm(512, eps=1e-5).to(dtype)
    x = (torch.randn(5, 512) * 300).to(dtype)  # squares that float16 could not hold
    with torch.no_grad():
        expected = reference(x)
    actual = RmsNorm(reference.weight.data, 1e-5, TorchOps())(x)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


def test_swiglu_agrees_with_transformers() -> None:
    torch.manual_seed(0)
    reference = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=112))
    swiglu = GatedMlp(
        DenseLinear(torch.cat((reference.gate_proj.weight, reference.up_proj.weight))),
        DenseLinear(reference.down_proj.weight),
        TorchOps().silu_and_mul,
    )
    x = torch.randn(9, 64)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(x), reference(x), atol=1e-5, rtol=0)
