"""A whole model with Triton kernels gives the same tokens as with torch operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benches.gpu.random_model import LLAMA_2_7B, random_llama
from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.engine.device.graphs import CudaRecorder, DecodeGraphs
from llorch_worker.engine.loading import recorded
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import Ops, TorchOps
from llorch_worker.kernels.triton import TritonOps
from llorch_worker.model import RaggedBatch
from tests.kernels.interpreter import DEVICE, INTERPRETED
from tests.sizes import sized

CONFIG = replace(
    LLAMA_2_7B,
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_context=96,
)
PROMPTS = ([5, 9, 2, 11, 7], list(range(20, 57)), [3])
TOKENS = sized(usual=3, full=4)
"""The second is the first of a recorded step, the third that of its replay."""
BLOCKS = ([4, 0, 9, 1], [8, 2, 6, 3], [5, 7, 10, 11])


class Replayed:
    """Replays a recording by calling the function again with the host values of that time."""

    def record(self, run):
        run()
        return run


def greedy(
    ops: Ops, kv_dtype: KvDtype, tokens: int, *, graphs: bool = False, layers: int = 2
) -> list[list[int]]:
    """Tokens of all prompts: prefilled together, the second in two chunks, then decoded."""
    config = replace(CONFIG, num_layers=layers)
    model = random_llama(config, ops, dtype=torch.float32, device=DEVICE)
    shape = cache_shape(
        config, 64, dtype=torch.float32, device=DEVICE, kv_dtype=kv_dtype, decode_rows=3 * graphs
    )
    cache = UnifiedCache.allocate(shape, 12)
    runs = model
    if graphs:
        # The interpreter runs no part of a function alone.
        runs = (
            DecodeGraphs(model, cache, Replayed())
            if INTERPRETED
            else recorded(model, cache, CudaRecorder(DEVICE))
        )

    def step(chunks: list[list[int]], starts: list[int]) -> list[int]:
        lengths = [len(chunk) for chunk in chunks]
        positions = [s + i for s, n in zip(starts, lengths, strict=True) for i in range(n)]
        owners = [i for i, n in enumerate(lengths) for _ in range(n)]
        slots = [BLOCKS[o][p // 16] * 16 + p % 16 for o, p in zip(owners, positions, strict=True)]
        ends = torch.tensor(lengths).cumsum(0) - 1

        def row(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=DEVICE)

        tables = torch.tensor(BLOCKS, dtype=torch.int32, device=DEVICE)
        batch = RaggedBatch(
            token_ids=row([token for chunk in chunks for token in chunk]),
            positions=row(positions),
            query_lengths=tuple(lengths),
            context_lengths=tuple(s + n for s, n in zip(starts, lengths, strict=True)),
            places=(Places(tables, row(slots)),),
            logits_rows=ends.to(DEVICE),
        )
        return runs.forward(batch, cache).argmax(-1).tolist()

    step([PROMPTS[0], PROMPTS[1][:20], PROMPTS[2]], [0, 0, 0])
    # The first and the last prompt decode their last token again beside the second one's chunk.
    next_ids = step(
        [PROMPTS[0][-1:], PROMPTS[1][20:], PROMPTS[2][-1:]],
        [len(PROMPTS[0]) - 1, 20, len(PROMPTS[2]) - 1],
    )
    lengths = [len(prompt) for prompt in PROMPTS]
    out = [[token] for token in next_ids]
    for _ in range(tokens - 1):
        next_ids = step([[token] for token in next_ids], lengths)
        lengths = [length + 1 for length in lengths]
        for tokens, token in zip(out, next_ids, strict=True):
            tokens.append(token)
    return out


@pytest.mark.parametrize("graphs", sized(usual=[True], full=[False, True]))
def test_greedy_tokens_equal_those_of_the_torch_operations(graphs: bool) -> None:
    expected = greedy(TorchOps(), "auto", TOKENS)
    assert greedy(TritonOps(processors=8), "auto", TOKENS, graphs=graphs) == expected


@pytest.mark.parametrize("kv_dtype", sized(usual=["int8"], full=["fp8", "int8"]))
def test_a_quantised_cache_gives_the_same_tokens_with_graphs_as_without(kv_dtype: KvDtype) -> None:
    eager = greedy(TritonOps(processors=8), kv_dtype, 3, layers=1)
    assert greedy(TritonOps(processors=8), kv_dtype, 3, graphs=True, layers=1) == eager
