"""A model with its own cache, driven one step at a time, and small reference Llamas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

from llorch_worker.cache import CacheShape, Places, UnifiedCache
from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import Ops, TorchOps
from llorch_worker.model import ModelConfig, RaggedBatch, Transformer, resolve_config
from llorch_worker.weights import DenseLinears, Linears, open_checkpoint

BLOCK_SIZE = 16


@dataclass
class Driver:
    """A minimal engine: allocates blocks and builds batches."""

    model: Transformer
    cache: UnifiedCache
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 64,
        max_query_tokens: int = 1024,
        ops: Ops | None = None,
        kv_dtype: KvDtype = "auto",
        linears: Linears | None = None,
    ) -> Driver:
        checkpoint = open_checkpoint(path)
        config = resolve_config(checkpoint)
        device = torch.device("cpu")
        model = Transformer.load(
            checkpoint,
            config,
            dtype=dtype,
            device=device,
            linears=linears or DenseLinears(device, dtype),
            ops=ops or TorchOps(),
        )
        return cls(model, new_cache(config, dtype, num_blocks, max_query_tokens, kv_dtype))

    def batch(self, chunks: dict[str, Sequence[int]], *, all_logits: bool = False) -> RaggedBatch:
        """The next step of each named sequence with its new tokens; allocates blocks as needed."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        contexts: list[int] = []
        for name, chunk in chunks.items():
            start = self.lengths.get(name, 0)
            context = start + len(chunk)
            table = self.tables.setdefault(name, [])
            table += self.cache.blocks.allocate(-(-context // BLOCK_SIZE) - len(table))
            ids += chunk
            positions += range(start, context)
            slots += [
                table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, context)
            ]
            rows += range(len(ids) - len(chunk), len(ids)) if all_logits else [len(ids) - 1]
            contexts.append(context)
            self.lengths[name] = context
        widest = max(len(self.tables[name]) for name in chunks)
        tables = torch.tensor(
            [self.tables[n] + [0] * (widest - len(self.tables[n])) for n in chunks],
            dtype=torch.int32,
        )
        return RaggedBatch(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            query_lengths=tuple(len(chunk) for chunk in chunks.values()),
            context_lengths=tuple(contexts),
            places=(Places(tables, torch.tensor(slots)),),
            logits_rows=torch.tensor(rows, dtype=torch.int64),
        )

    def step(self, chunks: dict[str, Sequence[int]], *, all_logits: bool = False) -> torch.Tensor:
        """One forward pass: the last row of each sequence's logits, or all rows."""
        return self.model.forward(self.batch(chunks, all_logits=all_logits), self.cache)

    def free(self, name: str) -> None:
        self.cache.blocks.free(self.tables.pop(name))
        del self.lengths[name]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab] in one pass with an empty cache."""
        out = self.step({"logits": ids}, all_logits=True)
        self.free("logits")
        return out


def new_cache(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 64,
    max_query_tokens: int = 1024,
    kv_dtype: KvDtype = "auto",
) -> UnifiedCache:
    return UnifiedCache.allocate(
        CacheShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ropes=config.ropes,
            max_context=config.max_context,
            block_size=BLOCK_SIZE,
            max_query_tokens=max_query_tokens,
            dtype=dtype,
            device=torch.device("cpu"),
            kv_dtype=kv_dtype,
        ),
        num_blocks,
    )


@pytest.fixture(scope="session")
def open_driver() -> Callable[..., Driver]:
    return Driver.open


@pytest.fixture(scope="session")
def save_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a small random grouped-query Llama as a Hugging Face folder; options override."""

    def save(max_shard_size: str = "1GB", **options: object) -> Path:
        settings: dict[str, object] = {
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 112,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            # Larger than the usual 0.02, so that attention is far from uniform.
            "initializer_range": 0.2,
        }
        torch.manual_seed(7)
        model = LlamaForCausalLM(ReferenceConfig(**(settings | options)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        folder = tmp_path_factory.mktemp("llama")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


@pytest.fixture(scope="session")
def random_llama(save_llama: Callable[..., Path]) -> Path:
    return save_llama()
