"""What a step must read and compute at least, and how long a device needs for that at best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.cache import PagedKV
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.model import Llama, LlamaConfig
from llorch_worker.settings import KvDtype


@dataclass(frozen=True)
class Work:
    """Of one step."""

    read_bytes: int
    flops: int

    def best_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Reading and computing at the same time, each at the device's own rate."""
        return max(self.read_bytes / bytes_per_s, self.flops / flops_per_s)


def matrix_bytes(model: Llama) -> int:
    """Of all matrices that a step multiplies with; of the embedding it reads next to nothing."""
    layers = (
        (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down)
        for block in model.blocks
    )
    return model.output.weight_bytes + sum(
        linear.weight_bytes for linears in layers for linear in linears
    )


def kv_token_bytes(config: LlamaConfig, *, dtype: torch.dtype, kv_dtype: KvDtype) -> int:
    """What the cache keeps of a token in all layers."""
    shape = cache_shape(config, 1, dtype=dtype, device=torch.device("cpu"), kv_dtype=kv_dtype)
    return sum(PagedKV.slot_bytes(shape).values())


def decode_work(
    config: LlamaConfig, *, batch: int, contexts: int, matrix_bytes: int, kv_token_bytes: int
) -> Work:
    """A step of one new token for each of ``batch`` sequences, which hold ``contexts`` tokens
    together, new ones included; ``kv_token_bytes``: what the cache keeps of a token."""
    matrices, output = _matrix_numbers(config)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * contexts
    return Work(
        read_bytes=matrix_bytes + kv_token_bytes * contexts,
        flops=2 * batch * (matrices + output) + attention,
    )


def prefill_flops(config: LlamaConfig, *, tokens: int) -> int:
    """One sequence's whole prompt in one step: each token sees half of it on average."""
    matrices, output = _matrix_numbers(config)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return 2 * (tokens * matrices + output) + attention * (tokens * (tokens + 1) // 2)


def _matrix_numbers(config: LlamaConfig) -> tuple[int, int]:
    """Weights in the matrices of all layers, and in the output matrix."""
    heads = config.num_heads + 2 * config.num_kv_heads
    of_layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    of_layer += 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * of_layer, config.hidden_size * config.vocab_size
