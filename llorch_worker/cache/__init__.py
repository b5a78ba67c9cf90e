"""The unified cache of a process: paged KV blocks, RoPE tables, one causal mask if the kernels
read one."""

from llorch_worker.cache.block_pool import BlockAccountingError, BlockPool, NoFreeBlocks
from llorch_worker.cache.causal_masks import CausalMasks
from llorch_worker.cache.decode_buffers import DecodeBuffers
from llorch_worker.cache.kv import PagedKV, Places
from llorch_worker.cache.prefix import Prefix
from llorch_worker.cache.rope_tables import Rope, RopeScaling, RopeTables
from llorch_worker.cache.shape import BLOCK_SIZE_TOKENS, MAX_QUERY_TOKENS, CacheShape
from llorch_worker.cache.unified import UnifiedCache
from llorch_worker.cache.window_pool import WindowPool

__all__ = [
    "BLOCK_SIZE_TOKENS",
    "MAX_QUERY_TOKENS",
    "BlockAccountingError",
    "BlockPool",
    "CacheShape",
    "CausalMasks",
    "DecodeBuffers",
    "NoFreeBlocks",
    "PagedKV",
    "Places",
    "Prefix",
    "Rope",
    "RopeScaling",
    "RopeTables",
    "UnifiedCache",
    "WindowPool",
]
