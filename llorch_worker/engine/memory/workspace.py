"""The memory that a step needs besides weights and cache, planned from the model's shape."""

from __future__ import annotations

import torch

from llorch_worker.cache import CacheShape
from llorch_worker.model import LlamaConfig

CUDA_LIBRARY_BYTES = 64 * 2**20
"""Memory that cuBLAS and similar libraries keep on a card once they have run."""
SAMPLER_LOGIT_BYTES = 64
"""Bytes of each logit if every sequence asks for truncation, penalties and log probabilities.
Logits, log softmax, three tables of penalties, and weights take 24 bytes as float32. Truncation
adds at most 38, for its sort with int64 indices or for the sorted rows' masses."""


def workspace_bytes(
    config: LlamaConfig, shape: CacheShape, *, max_sequences: int, max_step_tokens: int
) -> int:
    """Bytes that a full step needs at once besides weights and cache.

    That is the largest of its MLP, its attention with the keys and values of one full context
    gathered, and its logits and sampling. Recorded decode steps need separate memory.

    This is a plan; a worker measures the real use of its steps after the warm-up.
    """
    item, hidden = shape.dtype.itemsize, config.hidden_size
    heads = config.num_heads + 2 * config.num_kv_heads
    # Every token has an id, a position, a slot, a cosine and a sine for each pair of a head.
    token = 3 * torch.int64.itemsize + config.head_dim * torch.float32.itemsize
    mlp_row = 4 * (hidden + config.intermediate_size) * item + token
    qkv_row = (2 * hidden + (heads + config.num_heads) * config.head_dim) * item + token
    gathered = 2 * shape.max_context * config.num_kv_heads * config.head_dim * item
    sampled_row = config.vocab_size * (item + SAMPLER_LOGIT_BYTES) + 2 * hidden * item + token
    step = max(max_step_tokens * mlp_row, max_step_tokens * qkv_row + gathered)
    step = max(step, max_sequences * sampled_row)
    slots = 2 * shape.max_context * torch.int64.itemsize
    # A recorded step gathers nothing: it reads the blocks in place.
    logits_row = config.vocab_size * (item + torch.float32.itemsize)
    recorded = shape.decode_rows * max(mlp_row, qkv_row, logits_row)
    libraries = CUDA_LIBRARY_BYTES if shape.device.type == "cuda" else 0
    return step + slots + recorded + libraries
