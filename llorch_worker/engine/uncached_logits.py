"""Logits of a whole text in one pass, without the KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from llorch_worker.cache import BlockPool, PagedKV, Places, UnifiedCache
from llorch_worker.contract import Fault, InvalidRequest
from llorch_worker.model import ForwardModel, RaggedBatch


def check_token_ids(token_ids: list[int], max_context: int, vocab_size: int) -> None:
    """Raises ``InvalidRequest`` for no ids, more than ``max_context``, or unknown ones."""
    faults = []
    if not 1 <= len(token_ids) <= max_context:
        rule = f"must be 1 to {max_context} tokens"
        faults.append(Fault(field="token_ids", rule=rule, got=f"{len(token_ids)} tokens"))
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        rule = f"token ids must be below {vocab_size}, the vocabulary's size"
        faults.append(Fault(field="token_ids", rule=rule, got="an id beyond it"))
    if faults:
        raise InvalidRequest.from_faults(faults)


def uncached_logits(model: ForwardModel, cache: UnifiedCache, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] float32, on the CPU.

    Uses the RoPE tables and masks of ``cache`` but its own keys and values, so it works when every
    block is held, and leaves nothing behind.
    """
    device = cache.shape.device
    count = len(token_ids)
    num_blocks = -(-count // cache.block_size)
    kv = PagedKV(cache.shape, [num_blocks] * len(cache.shape.groups))
    row = torch.arange(count, device=device)
    tables = torch.arange(num_blocks, device=device).unsqueeze(0)
    batch = RaggedBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=row,
        query_lengths=(count,),
        context_lengths=(count,),
        block_tables=tables,
        slots=row,
        windowed=(Places(tables, row),) * (len(kv.groups) - 1),
        logits_rows=row,
    )
    logits = model.forward(batch, replace(cache, kv=kv, blocks=BlockPool(num_blocks)))
    # Callers may write to the clone; a tensor made in inference mode is read-only.
    with torch.inference_mode(False):
        return logits.cpu().clone()
