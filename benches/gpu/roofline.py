"""What a step must read and compute at least, and how long a device needs for that at best."""

from __future__ import annotations

from dataclasses import dataclass

from llorch_worker.model import LlamaConfig


@dataclass(frozen=True)
class Work:
    """Of one step."""

    read_bytes: int
    flops: int

    def best_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Reading and computing at the same time, each at the device's own rate."""
        return max(self.read_bytes / bytes_per_s, self.flops / flops_per_s)


def step_work(
    config: LlamaConfig,
    *,
    tokens: int,
    contexts: int,
    logits_rows: int,
    item_bytes: int,
    kv_item_bytes: int,
) -> Work:
    """A step of one new token for each sequence, which hold ``contexts`` tokens together."""
    heads = config.num_heads + 2 * config.num_kv_heads
    of_layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    of_layer += 3 * config.hidden_size * config.intermediate_size
    matrices = config.num_layers * of_layer
    output = config.hidden_size * config.vocab_size
    kv_numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim * contexts
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * contexts
    return Work(
        read_bytes=(matrices + output) * item_bytes + kv_numbers * kv_item_bytes,
        flops=2 * tokens * matrices + 2 * logits_rows * output + attention,
    )


def prefill_work(config: LlamaConfig, *, tokens: int, item_bytes: int) -> Work:
    """One sequence's whole prompt in one step: each token sees half of it on average."""
    work = step_work(
        config,
        tokens=tokens,
        contexts=tokens,
        logits_rows=1,
        item_bytes=item_bytes,
        kv_item_bytes=item_bytes,
    )
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return Work(work.read_bytes, work.flops + attention * (tokens * (tokens + 1) // 2 - tokens))
