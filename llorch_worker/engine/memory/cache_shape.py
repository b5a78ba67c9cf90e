"""The shape of the cache that a model needs."""

from __future__ import annotations

import torch

from llorch_worker.cache import MAX_QUERY_TOKENS, CacheShape
from llorch_worker.engine_options import KvDtype
from llorch_worker.model import ModelConfig


def cache_shape(
    config: ModelConfig,
    max_context: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KvDtype = "auto",
    decode_rows: int = 0,
    max_query_tokens: int = MAX_QUERY_TOKENS,
    max_sequences: int = 0,
    max_step_tokens: int = 0,
) -> CacheShape:
    """The shape of a cache for ``config``."""
    return CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ropes=config.ropes,
        max_context=max_context,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        decode_rows=decode_rows,
        vocab_size=config.vocab_size,
        max_query_tokens=max_query_tokens,
        windows=config.graph.windows,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
    )
