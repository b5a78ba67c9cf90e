"""The least that a step must read and compute, and the shortest time a device needs for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.cache import PagedKV
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.engine_options import KvDtype
from llorch_worker.model import Llama, LlamaConfig


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    read_bytes: int
    flops: int

    def best_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The time if reading and computing overlap, each at the device's own rate."""
        return max(self.read_bytes / bytes_per_s, self.flops / flops_per_s)


def matrix_bytes(model: Llama) -> int:
    """Bytes of all matrices that a step multiplies by. It reads almost nothing of the embedding."""
    layers = (
        (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down)
        for block in model.blocks
    )
    return model.output.weight_bytes + sum(
        linear.weight_bytes for linears in layers for linear in linears
    )


def kv_token_bytes(config: LlamaConfig, *, dtype: torch.dtype, kv_dtype: KvDtype) -> int:
    """Bytes that the cache keeps per token in all layers."""
    shape = cache_shape(config, 1, dtype=dtype, device=torch.device("cpu"), kv_dtype=kv_dtype)
    return sum(PagedKV.slot_bytes(shape).values())


def decode_work(
    config: LlamaConfig, *, batch: int, contexts: int, matrix_bytes: int, kv_token_bytes: int
) -> Work:
    """A step with one new token for each of ``batch`` sequences, which hold ``contexts`` tokens
    together, new ones included; ``kv_token_bytes``: bytes that the cache keeps per token."""
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
    """The number of weights in the matrices of all layers and in the output matrix."""
    heads = config.num_heads + 2 * config.num_kv_heads
    of_layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    of_layer += 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * of_layer, config.hidden_size * config.vocab_size
