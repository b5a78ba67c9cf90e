"""What of the GPU benchmark needs no GPU: its model, its arithmetic and its refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import torch

from benches.gpu.random_model import LLAMA_2_7B, random_llama
from benches.gpu.roofline import prefill_work, step_work
from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.block_plan import cache_shape
from llorch_worker.kernels import TorchOps
from llorch_worker.model import RaggedBatch

TINY = replace(
    LLAMA_2_7B,
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=32,
)


def test_a_random_model_computes_and_counts_its_bytes() -> None:
    cpu = torch.device("cpu")
    model = random_llama(TINY, TorchOps(), dtype=torch.float32, device=cpu)
    shape = cache_shape(TINY, 32, dtype=torch.float32, device=cpu)
    cache = UnifiedCache.allocate(num_blocks=2, **shape)
    row = torch.arange(3)
    batch = RaggedBatch(row, row, (3,), (3,), torch.tensor([[0, 1]]), row, row[2:])
    logits = model.forward(batch, cache)
    assert logits.shape == (1, 50)
    assert bool(logits.isfinite().all())
    work = step_work(TINY, tokens=0, contexts=0, logits_rows=0, item_bytes=4, kv_item_bytes=4)
    norms, embedding = 5 * 32 * 4, 50 * 32 * 4
    assert work.read_bytes == model.weight_bytes - norms - embedding


def test_a_7b_step_reads_what_is_known_of_it() -> None:
    work = step_work(
        LLAMA_2_7B, tokens=1, contexts=1000, logits_rows=1, item_bytes=2, kv_item_bytes=2
    )
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000)
    assert work.read_bytes == weights + 1000 * 2**19  # half a MiB a token
    assert work.best_s(1e12, 1e15) == work.read_bytes / 1e12


def test_a_prompt_attends_to_half_of_itself() -> None:
    short, long = (prefill_work(LLAMA_2_7B, tokens=t, item_bytes=2).flops for t in (1000, 2000))
    attention = 4 * 32 * 4096 * (2000 * 2001 // 2 - 2 * (1000 * 1001 // 2))
    assert long - 2 * short == attention - 2 * 4096 * 32000


def test_without_cuda_it_says_so_and_measures_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benches.gpu", "--json"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs a CUDA device" in done.stderr
