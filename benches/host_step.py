"""Processor time that a step costs the host, to its message, the forward pass stubbed.

    python -m benches.host_step [--sequences 256] [--long 100000] [--steps 40]

The sampler computes on this machine, for a vocabulary so small that this is a matter of calls and
not of numbers. What a card costs the host beyond that, launches and copies, is not in it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from typing import Annotated, Any

import torch
import typer

from benches.command import heading, main, row
from llorch_worker.cache import CacheShape, UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.core import EngineCore
from llorch_worker.engine.device.queue import InlineQueue
from llorch_worker.engine.generation import Generation
from llorch_worker.engine.process.messages import EventTold, Step, encode
from llorch_worker.engine.runner import Runner
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.stats import Counters
from llorch_worker.engine.told import TokensTold
from llorch_worker.kernels import select_truncate_rows
from llorch_worker.model import RaggedBatch
from llorch_worker.processes.board import Board

VOCAB = 128
SHORT_TOKENS = 500
BLOCK_TOKENS = 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "every option": {
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {5: 1.0},
        "min_tokens": 1000,
        "logprobs": 2,
    },
}
PARTS = {
    "plan": (Scheduler, ("schedule", "schedule_ahead", "advance")),
    "launch": (Runner, ("launch",)),
    "sample": (Sampler, ("prepare", "_choose")),
}


class NoText:
    """Takes tokens and says nothing: detokenizing is no part of a step's launch."""

    thinking = False

    def push(self, *_: object, **__: object) -> bool:
        return False

    def take(self) -> tuple[str, str, tuple[()]]:
        return "", "", ()


class NoForward:
    """A forward pass that computes nothing."""

    def __init__(self, rows: int) -> None:
        self._logits = torch.randn(rows, VOCAB)

    def forward(self, batch: RaggedBatch, _: UnifiedCache) -> torch.Tensor:
        return self._logits[: len(batch.logits_rows)].clone()


class Ahead(InlineQueue):
    """A device that is always done at once, for which steps are launched ahead."""

    overlaps = True


def host_step(
    sequences: Annotated[int, typer.Option("--sequences", min=1)] = 256,
    long: Annotated[int, typer.Option("--long", help="Tokens of one of them.")] = 100_000,
    steps: Annotated[int, typer.Option("--steps", min=10)] = 40,
) -> None:
    """Milliseconds of the engine's thread a step, and its parts: medians of ``steps`` steps."""
    # More would wait for each other, and the host has one.
    torch.set_num_threads(1)
    spent = _watch()
    heading("sampling", "a step, ms", *PARTS, "ahead")
    for name, fields in OPTIONS.items():
        told: list[TokensTold | EventTold] = []
        core = _core(sequences, long, fields, told)
        for _ in range(5):
            core.step()
        gc.collect()
        gc.disable()
        whole, ahead = [], 0
        parts: dict[str, list[float]] = defaultdict(list)
        for _ in range(steps):
            spent.clear()
            told.clear()
            begun_s = time.thread_time()
            core.step()
            encode(Step(told))
            whole.append(time.thread_time() - begun_s)
            for part in PARTS:
                parts[part].append(spent[part])
            ahead += core._launcher.is_ahead
        gc.enable()
        row(
            name,
            *(f"{1e3 * statistics.median(times):.2f}" for times in (whole, *parts.values())),
            f"{ahead / steps:.0%}",
        )


def _watch() -> defaultdict[str, float]:
    """Adds up the time within the methods of each part."""
    spent: defaultdict[str, float] = defaultdict(float)

    def timed(part: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            begun_s = time.thread_time()
            try:
                return method(*args, **options)
            finally:
                spent[part] += time.thread_time() - begun_s

        return call

    for part, (owner, names) in PARTS.items():
        for each in names:
            if hasattr(owner, each):
                setattr(owner, each, timed(part, getattr(owner, each)))
    return spent


def _core(
    count: int, long: int, fields: dict[str, Any], told: list[TokensTold | EventTold]
) -> EngineCore:
    """An engine's core in which all sequences decode, and tell ``told`` of their tokens, as they do
    in an engine's process."""
    lengths = [long, *[SHORT_TOKENS] * (count - 1)]
    blocks = sum(-(-(length + 600) // BLOCK_TOKENS) for length in lengths)
    device = torch.device("cpu")
    shape = CacheShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        ropes=(),
        max_context=2**17,
        dtype=torch.float32,
        device=device,
        max_query_tokens=0,
        vocab_size=VOCAB,
    )
    cache = UnifiedCache.allocate(shape, blocks)
    scheduler = Scheduler(
        cache.blocks,
        cache.windows,
        block_size=cache.block_size,
        max_sequences=count,
        max_step_tokens=sum(lengths),
        prefix_caching=False,
    )
    # As an engine on this machine: a card truncates within the one launch that samples.
    sampler = Sampler(VOCAB, device, truncate_rows=select_truncate_rows(device, "auto"))
    runner = Runner(NoForward(count), cache, sampler, device, Ahead())
    core = EngineCore(scheduler, runner, Counters(), lambda _: ("", ()), board=Board(2 * count))
    for number, length in enumerate(lengths):
        request = GenerationRequest(
            prompt_token_ids=[number % VOCAB], max_tokens=2**16, ignore_eos=True, **fields
        )
        sequence = Sequence(
            [number % VOCAB] * length,
            request,
            seed=number,
            text=NoText(),  # type: ignore[arg-type]
            arrival=number,
        )
        core.add(
            Generation(
                f"{number}",
                request,
                (sequence,),
                model_name="none",
                worker="none",
                attempt=1,
                queued_at=None,
                on_event=None,
                on_tokens=told.append,
                request_cancel=lambda _: None,
            )
        )
    return core


if __name__ == "__main__":
    main(host_step, "host_step")
