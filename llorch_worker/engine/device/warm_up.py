"""Steps that go before all jobs, so that no job waits for a kernel to be compiled.

Which variants of its kernels a step takes follows from three numbers: its tokens, the longest
piece of a prompt in it, and how many sequences decode or want logits. Kernels round each up to a
power of two before they choose, so steps at the powers of two and at the most see all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.runner import ForwardModel
from llorch_worker.model import RaggedBatch


def compiles_late(device: torch.device) -> bool:
    """Whether kernels on ``device`` are compiled when a step first wants them."""
    return device.type == "cuda"


def warm_up(
    model: ForwardModel, cache: UnifiedCache, *, max_sequences: int, max_step_tokens: int
) -> None:
    """Runs every size of step through ``model``; all of them write to the cache's first block, so
    nobody may have published or hold it."""
    for tokens in sizes(max_step_tokens):
        model.forward(_batch(_prompts(tokens, cache.max_context), 1, cache), cache)
    for sequences in sizes(min(max_sequences, max_step_tokens)):
        model.forward(_batch((1,) * sequences, sequences, cache), cache)


def sizes(most: int) -> Iterator[int]:
    """The powers of two below ``most``, and ``most``."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _prompts(tokens: int, max_context: int) -> tuple[int, ...]:
    """As few as hold so many tokens."""
    whole, rest = divmod(tokens, max_context)
    return (max_context,) * whole + (rest,) * bool(rest)


def _batch(lengths: tuple[int, ...], logits: int, cache: UnifiedCache) -> RaggedBatch:
    """Prompts of such lengths from their beginning on; the last ``logits`` tokens' are wanted."""
    device = cache.kv.keys.device
    tokens = sum(lengths)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    width = -(-max(lengths) // cache.block_size)
    return RaggedBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_lengths=lengths,
        context_lengths=lengths,
        block_tables=torch.zeros(len(lengths), width, dtype=torch.int64, device=device),
        slots=positions % cache.block_size,
        logits_rows=torch.arange(tokens - logits, tokens, device=device),
    )
