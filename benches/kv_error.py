"""The error of a KV cache in fp8 or int8, on a real model.

``python -m benches.kv_error --model FILE [--dtype float32] [--json]``

Each kv_dtype reads a greedy text of the exact cache token by token, as decode does, and its logits
are compared with the exact cache's. The texts that each kv_dtype generates are compared too. Runs
on any device, always with the torch operations.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benches.arguments import existing_path, known_errors
from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.engine.memory.placement import resolve_device, resolve_dtype
from llorch_worker.kernels import TorchOps
from llorch_worker.model import Llama, RaggedBatch, parameter_count, resolve_config
from llorch_worker.settings import KvDtype
from llorch_worker.weights import DenseLinears, open_checkpoint

PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a big red ball.",
    "The dog ran into the garden and",
    "One day, a bird",
)
KV_DTYPES: tuple[KvDtype, ...] = ("fp8", "int8")


@dataclass(frozen=True)
class KvError:
    """The error of one kv_dtype against the exact cache, over all places of all texts."""

    kv_dtype: str
    places: int
    kv_bytes_share: float
    """Share of the exact cache's bytes, scales included."""
    max_logit_error: float
    mean_logit_error: float
    logit_spread: float
    """Standard deviation of the exact logits, for comparison with the errors."""
    mean_divergence: float
    """Kullback-Leibler divergence, in nats, from the exact distribution of the next token."""
    same_top_token: float
    """Share of places with the same most likely token."""
    same_greedy_tokens: float
    """Share of generated tokens before the first that differs, over all prompts."""


def read_by_decode(
    path: Path, device: torch.device, dtype: torch.dtype, kv_dtype: KvDtype, texts: list[list[int]]
) -> tuple[torch.Tensor, int]:
    """Logits [places, vocab] after each token of each text, and the cache's bytes per token."""
    checkpoint = open_checkpoint(path)
    config = resolve_config(checkpoint)
    model = Llama.load(
        checkpoint,
        config,
        dtype=dtype,
        device=device,
        linears=DenseLinears(device, dtype),
        ops=TorchOps(),
    )
    longest = max(map(len, texts))
    shape = cache_shape(config, longest, dtype=dtype, device=device, kv_dtype=kv_dtype)
    size = shape.block_size
    blocks = -(-longest // size)
    cache = UnifiedCache.allocate(shape, blocks)
    table = torch.arange(blocks, device=device).unsqueeze(0)
    rows = []
    for text in texts:
        for place, token_id in enumerate(text):
            at = torch.tensor([place], device=device)
            batch = RaggedBatch(
                token_ids=torch.tensor([token_id], device=device),
                positions=at,
                query_lengths=(1,),
                context_lengths=(place + 1,),
                block_tables=table,
                slots=at,
                logits_rows=torch.zeros(1, dtype=torch.int64, device=device),
            )
            rows.append(model.forward(batch, cache).clone())
    parts = cache.bytes_by_part()
    return torch.cat(rows), parts["kv"] + parts.get("kv_scales", 0)


def greedy(path: Path, device: str, dtype: str, kv_dtype: KvDtype, tokens: int) -> list[list[int]]:
    """For each prompt, its ids and ``tokens`` generated ids."""
    with Engine.load(path, device, dtype, kernels="torch", kv_dtype=kv_dtype) as engine:
        generations = [
            engine.submit(
                GenerationRequest(prompt=p, max_tokens=tokens, temperature=0, ignore_eos=True)
            )
            for p in PROMPTS
        ]
        return [
            [*engine.tokenizer.encode(p), *g.result(600).choices[0].token_ids]
            for p, g in zip(PROMPTS, generations, strict=True)
        ]


def measure(path: Path, device: str, dtype: str, tokens: int) -> list[KvError]:
    place = resolve_device(device)
    config = resolve_config(open_checkpoint(path))
    compute = resolve_dtype(dtype, place, parameters=parameter_count(config))
    texts = greedy(path, device, dtype, "auto", tokens)
    exact, exact_bytes = read_by_decode(path, place, compute, "auto", texts)
    errors = []
    for kv_dtype in KV_DTYPES:
        logits, kv_bytes = read_by_decode(path, place, compute, kv_dtype, texts)
        difference = (logits - exact).abs()
        divergence = torch.nn.functional.kl_div(
            logits.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        own = greedy(path, device, dtype, kv_dtype, tokens)
        same = sum(_agreement(a, b) - (len(a) - tokens) for a, b in zip(texts, own, strict=True))
        errors.append(
            KvError(
                kv_dtype=kv_dtype,
                places=len(exact),
                kv_bytes_share=kv_bytes / exact_bytes,
                max_logit_error=float(difference.max()),
                mean_logit_error=float(difference.mean()),
                logit_spread=float(exact.std()),
                mean_divergence=float(divergence.mean()),
                same_top_token=float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
                same_greedy_tokens=same / (tokens * len(texts)),
            )
        )
    return errors


def _agreement(one: list[int], other: list[int]) -> int:
    """The length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=existing_path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=160, help="tokens to generate per prompt")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    errors = measure(given.model, given.device, given.dtype, given.tokens)
    if given.json:
        json.dump([asdict(error) for error in errors], sys.stdout, indent=2)
        print()
        return
    for error in errors:
        print(error.kv_dtype)
        for name, value in asdict(error).items():
            if name != "kv_dtype":
                print(f"  {name:20} {value:.6g}")


if __name__ == "__main__":
    with known_errors():
        main()
