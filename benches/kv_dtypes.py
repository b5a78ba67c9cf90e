"""Decode over KV caches of every dtype by turns: attention alone, and a whole step of the model.

``python -m benches.kv_dtypes FILE.gguf [--contexts 512,8192,32768] [--native]``. Keys and
values are random, so no context has to be computed. It measures the processor time of one thread,
which depends little on what else the machine does. Layers take turns, so that keys and values come
from memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from benches.arguments import existing_path, known_errors, whole_number, whole_numbers
from benches.by_turns import compare
from benches.components.bench_attention import batch_of, sequences_of
from benches.gpu.random_cache import draw_keys_and_values
from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.memory.load_plan import LoadPlan, plan_load
from llorch_worker.kernels import Ops, TorchOps
from llorch_worker.model import Llama
from llorch_worker.settings import KvDtype

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """One way to attend."""

    ops: Ops
    dtype: torch.dtype
    kv_dtype: KvDtype

    def __str__(self) -> str:
        kv = str(self.dtype).removeprefix("torch.") if self.kv_dtype == "auto" else self.kv_dtype
        return f"{self.ops.name} {kv}"


def random_cache(plan: LoadPlan, kind: Kind, tokens: int) -> UnifiedCache:
    shape = replace(plan.shape, dtype=kind.dtype, kv_dtype=kind.kv_dtype, max_context=tokens)
    cache = UnifiedCache.allocate(shape, -(-tokens // shape.block_size))
    draw_keys_and_values(cache.kv)
    return cache


def attention_step(
    plan: LoadPlan, kind: Kind, cache: UnifiedCache, sequences: int, context_tokens: int
) -> Callable[[], None]:
    """Attention of all layers, as a step prepares and calls it."""
    config = plan.config
    qkv = torch.randn(sequences, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    qkv = qkv.to(kind.dtype)
    out = torch.empty(sequences, config.num_heads * config.head_dim, dtype=kind.dtype)
    batch = sequences_of(batch_of(sequences, 1, context_tokens))

    def step() -> None:
        attend = kind.ops.paged_decode(batch)
        for layer in cache.kv.layers:
            attend(qkv, layer, out)

    return step


def model_step(
    model: Llama, cache: UnifiedCache, sequences: int, context_tokens: int
) -> Callable[[], None]:
    batch = batch_of(sequences, 1, context_tokens)
    batch = replace(batch, logits_rows=torch.arange(sequences))

    def step() -> None:
        model.forward(batch, cache)

    return step


def main(path: Path, contexts: tuple[int, ...], sequences: int, *, with_torch: bool) -> None:
    torch.set_num_threads(1)
    plan = plan_load(path, "cpu", "bfloat16", kernels="auto")
    native, plain = plan.kernels.ops, TorchOps()
    print(f"kernels: {plan.kernels.reason}")
    model = Llama.load(
        plan.checkpoint,
        plan.config,
        dtype=torch.bfloat16,
        device=CPU,
        linears=plan.linears,
        ops=native,
    )
    for context_tokens in contexts:
        attention: dict[str, Callable[[], None]] = {}
        steps: dict[str, Callable[[], None]] = {}
        for kv_dtype in get_args(KvDtype):
            kind = Kind(native, torch.bfloat16, kv_dtype)
            cache = random_cache(plan, kind, sequences * context_tokens)
            steps[str(kind)] = model_step(model, cache, sequences, context_tokens)
            for ops in (native, plain) if with_torch else (native,):
                kind = replace(kind, ops=ops)
                attention[str(kind)] = attention_step(plan, kind, cache, sequences, context_tokens)
        if with_torch:
            kind = Kind(plain, torch.float32, "auto")
            cache = random_cache(plan, kind, sequences * context_tokens)
            attention[str(kind)] = attention_step(plan, kind, cache, sequences, context_tokens)
        what = f"{sequences} x {context_tokens} tokens"
        compare(f"attention, {what}", attention)
        compare(f"step, {what}", steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benches.kv_dtypes")
    parser.add_argument("model", type=existing_path)
    parser.add_argument("--contexts", type=whole_numbers, default="512,8192,32768")
    parser.add_argument("--sequences", type=whole_number, default=1)
    parser.add_argument("--native", action="store_true", help="leave torch's attention out")
    given = parser.parse_args()
    with known_errors():
        main(given.model, given.contexts, given.sequences, with_torch=not given.native)
