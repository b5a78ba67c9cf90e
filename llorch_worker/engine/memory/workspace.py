"""What a step needs beside weights and cache, planned from the model's shape."""

from __future__ import annotations

import torch

from llorch_worker.model import LlamaConfig

CUDA_LIBRARY_BYTES = 64 * 2**20
"""What cuBLAS and its like keep on a card for themselves, once they have run."""
SAMPLER_LOGIT_BYTES = 64
"""For each logit where everyone asks for truncation, penalties and log probabilities: logits, log
softmax, penalties (three tables) and weights are float32, 24 bytes; then either a sort with its
int64 indices and its buffers on a card, or, once sorted, 38 more, of them three float64 masses."""


def workspace_bytes(
    config: LlamaConfig,
    *,
    max_context: int,
    max_sequences: int,
    max_step_tokens: int,
    decode_rows: int = 0,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """The largest of what is alive at once in a full step: of its MLP, of its attention with the
    keys and values of one full context gathered, or of its logits and sampling.

    Recorded decode steps of ``decode_rows`` sequences keep their memory beside it for good.

    A plan, to keep room for; what a step really takes is measured after the warm-up.
    """
    item, hidden = dtype.itemsize, config.hidden_size
    heads = config.num_heads + 2 * config.num_kv_heads
    mlp_row = (2 * hidden + 4 * config.intermediate_size) * item
    qkv_row = (2 * hidden + (heads + config.num_heads) * config.head_dim) * item
    gathered = 2 * max_context * config.num_kv_heads * config.head_dim * item
    logits = max_sequences * config.vocab_size * (item + SAMPLER_LOGIT_BYTES)
    libraries = CUDA_LIBRARY_BYTES if device.type == "cuda" else 0
    step = max(max_step_tokens * mlp_row, max_step_tokens * qkv_row + gathered, logits)
    # A recorded step gathers nothing: who records, reads the blocks in place.
    logits_row = config.vocab_size * (item + torch.float32.itemsize)
    recorded = decode_rows * max(mlp_row, qkv_row, logits_row)
    return step + recorded + libraries
