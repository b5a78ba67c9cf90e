from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from llorch_worker.kernels import TorchOps
from llorch_worker.model.block import SwiGlu
from llorch_worker.weights import DenseLinear


def test_it_agrees_with_transformers() -> None:
    torch.manual_seed(0)
    reference = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=112))
    swiglu = SwiGlu(
        DenseLinear(torch.cat((reference.gate_proj.weight, reference.up_proj.weight))),
        DenseLinear(reference.down_proj.weight),
        TorchOps(),
    )
    x = torch.randn(9, 64)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(x), reference(x), atol=1e-5, rtol=0)
