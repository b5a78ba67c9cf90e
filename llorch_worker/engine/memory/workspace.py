"""The memory that a step needs besides weights and cache, planned from the model's shape."""

from __future__ import annotations

from typing import Final

import torch

from llorch_worker.cache import CacheShape
from llorch_worker.contract.request import MAX_LOGPROBS
from llorch_worker.engine.device.pieces import piece_sizes
from llorch_worker.kernels import AttentionRoom, Ops
from llorch_worker.model import ModelConfig

CUDA_LIBRARY_BYTES = 64 * 2**20
"""Memory that cuBLAS and similar libraries keep on a card once they have run."""
SAMPLER_LOGIT_BYTES = 64
"""Bytes of each logit if every sequence asks for truncation, penalties and log probabilities.
Logits, log softmax, three tables of penalties, and weights take 24 bytes as float32. Beside greedy
rows the random ones are a copy, and beside untruncated rows the truncated ones are two: 12.
Truncation adds at most 25, for its sort with int64 indices and the sorted rows' masses. That is 61,
rounded up."""
DRAFT_ROWS: Final = 32
"""The most drafts in a step. Each has a row of logits."""
SCORED_LOGITS_BYTES: Final = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""The most float32 logits that exist at once while prompts are scored. Their log softmax takes as
much again, and the output matrix's product before it is widened at most that too. A card reads the
whole output matrix for each piece, so its pieces are larger; on the CPU that gains nothing."""


def workspace_bytes(
    config: ModelConfig,
    shape: CacheShape,
    ops: Ops,
    *,
    max_sequences: int,
    max_step_tokens: int,
    draft_rows: int = 0,
) -> int:
    """Bytes that a full step needs at once besides weights and cache.

    That is the largest of its MLP, its attention, and its logits and sampling. Recorded decode
    steps need separate memory. Scoring prompts takes no more (see :func:`scored_rows`).

    This is a plan; a worker measures the real use of its steps after the warm-up.
    """
    slots = 2 * len(shape.groups) * shape.max_context * torch.int64.itemsize
    libraries = CUDA_LIBRARY_BYTES if shape.device.type == "cuda" else 0
    step = _step_bytes(config, shape, ops, max_sequences, max_step_tokens, draft_rows)
    return step + slots + estimated_recorded_bytes(config, shape, ops) + libraries


def estimated_recorded_bytes(config: ModelConfig, shape: CacheShape, ops: Ops) -> int:
    """Bytes that recorded decode steps need for themselves; a load on a card measures them."""
    rows = shape.decode_rows
    if not rows:
        return 0
    logits_row = config.vocab_size * (shape.dtype.itemsize + torch.float32.itemsize)
    row = max(_mlp_row(config, shape), _qkv_row(config, shape), logits_row)
    mixed = piece_sizes(shape.max_step_tokens)[-1]
    # What is exchanged with attention, and what a piece computes.
    pieces = mixed * (_qkv_row(config, shape) + _mlp_row(config, shape))
    return pieces + rows * row + ops.attention_bytes(_attention_room(config, shape, rows, rows))


def scored_rows(
    config: ModelConfig, shape: CacheShape, ops: Ops, max_sequences: int, max_step_tokens: int
) -> int:
    """How many rows of logits may exist at once while prompts are scored; a power of two.

    They take the memory that is planned for the step's MLP, attention and sampling, of which the
    first two are over and the last has not begun. Each token's state and its scores stay.
    """
    item = shape.dtype.itemsize
    # A row, a target and a log probability; ids and log probabilities of the alternatives.
    score = 20 + 12 * MAX_LOGPROBS
    stays = max_step_tokens * (2 * config.hidden_size * item + _token(config) + score)
    room = _step_bytes(config, shape, ops, max_sequences, max_step_tokens) - stays
    row = config.vocab_size * (item + 2 * torch.float32.itemsize) + 2 * config.hidden_size * item
    most = SCORED_LOGITS_BYTES[shape.device.type] // (config.vocab_size * torch.float32.itemsize)
    return 1 << (max(1, min(room // row, most)).bit_length() - 1)


def _step_bytes(
    config: ModelConfig,
    shape: CacheShape,
    ops: Ops,
    max_sequences: int,
    max_step_tokens: int,
    draft_rows: int = 0,
) -> int:
    item = shape.dtype.itemsize
    room = _attention_room(config, shape, max_sequences, max_step_tokens)
    attention = ops.attention_bytes(room)
    sampled_row = config.vocab_size * (item + SAMPLER_LOGIT_BYTES)
    sampled_row += 2 * config.hidden_size * item + _token(config)
    return max(
        max_step_tokens * _mlp_row(config, shape),
        max_step_tokens * _qkv_row(config, shape) + attention,
        # The logits after drafts, and a copy of those that are sampled.
        max_sequences * sampled_row
        + draft_rows * config.vocab_size * (item + 2 * torch.float32.itemsize),
    )


def _attention_room(
    config: ModelConfig, shape: CacheShape, max_sequences: int, max_step_tokens: int
) -> AttentionRoom:
    return AttentionRoom(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=shape.dtype,
        max_context=shape.max_context,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        windows=tuple(group.window for group in shape.groups),
        device_type=shape.device.type,
        softcap=config.graph.softcap is not None,
        kv_dtype=shape.kv_dtype,
        mask_rows=shape.max_query_tokens,
    )


def _mlp_row(config: ModelConfig, shape: CacheShape) -> int:
    state = 4 * (config.hidden_size + config.intermediate_size)
    return state * shape.dtype.itemsize + _token(config)


def _qkv_row(config: ModelConfig, shape: CacheShape) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    state = 2 * config.hidden_size + heads * config.head_dim
    return state * shape.dtype.itemsize + _token(config)


def _token(config: ModelConfig) -> int:
    """Every token has an id, a position, a slot, a cosine and a sine for each pair of a head."""
    return 3 * torch.int64.itemsize + config.head_dim * torch.float32.itemsize
