"""The smallest model of the GPU benchmark's shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from benches.gpu.figures import Rates
from benches.gpu.random_model import LLAMA_2_7B, random_llama
from llorch_worker.kernels import TorchOps
from llorch_worker.model import Transformer

CPU = torch.device("cpu")
TINY = replace(
    LLAMA_2_7B,
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=32,
)

RATES = Rates(copy_bytes_per_s=1e9, read_bytes_per_s=None, matrix_flops_per_s=1e9)
"""Of no device."""


def tiny_llama(weights: str = "bf16", layers: int = 2) -> Transformer:
    """Computes in float32 on the CPU."""
    config = replace(TINY, num_layers=layers)
    return random_llama(config, TorchOps(), weights=weights, dtype=torch.float32, device=CPU)
