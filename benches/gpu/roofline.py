"""The least that a step must read and compute, and the shortest time a device needs for it."""

from __future__ import annotations

from dataclasses import dataclass

from llorch_worker.bench.instruments.model_costs import decode_flops
from llorch_worker.model import ModelConfig, Transformer


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    read_bytes: int
    flops: int

    def best_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The time if reading and computing overlap, each at the device's own rate."""
        return max(self.read_bytes / bytes_per_s, self.flops / flops_per_s)


def matrix_bytes(model: Transformer) -> int:
    """Bytes of all matrices that a step multiplies by. It reads almost nothing of the embedding."""
    layers = (
        (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down)
        for block in model.blocks
    )
    return model.output.weight_bytes + sum(
        linear.weight_bytes for linears in layers for linear in linears
    )


def decode_work(
    config: ModelConfig, *, batch: int, contexts: int, matrix_bytes: int, kv_token_bytes: int
) -> Work:
    """A step with one new token for each of ``batch`` sequences, which hold ``contexts`` tokens
    together, new ones included; ``kv_token_bytes``: bytes that the cache keeps per token."""
    return Work(
        read_bytes=matrix_bytes + kv_token_bytes * contexts,
        flops=decode_flops(config, batch, contexts),
    )
