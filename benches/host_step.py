"""Processor time that a step costs the host, to its message, the forward pass stubbed.

    python -m benches.host_step [--sequences 256] [--long 100000] [--steps 40]

The kernel that draws on a card is stubbed too. The calls that shape logits before it, and those for
log probabilities, stand for their launches: with a vocabulary of 16 tokens they cost what calls
cost. With 128 tokens their arithmetic takes a tenth of a ms more, which a card's host does not
spend. What the launches and copies of a card cost beyond that is not in it. In the last column this
processor draws the tokens.
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
from llorch_worker.engine.interface import ModelFacts
from llorch_worker.engine.process.messages import EventTold, Step, encode
from llorch_worker.engine.runner import Runner
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.stats import Counters
from llorch_worker.engine.told import TokensTold
from llorch_worker.kernels import SampledRows, select_truncate_rows
from llorch_worker.model import RaggedBatch
from llorch_worker.processes.board import Board

VOCAB = 16
SHORT_TOKENS = 500
BLOCK_TOKENS = 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "every option": {
        "top_p": 0.9,
        "top_k": 10,
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


def no_draw(_: torch.Tensor, __: SampledRows, positions: torch.Tensor) -> torch.Tensor:
    """A kernel that draws nothing: each row's token follows from its position."""
    return positions % VOCAB


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
    heading("sampling", "a step, ms", *PARTS, "ahead", "drawn here")
    device = torch.device("cpu")
    truncate_rows = select_truncate_rows(device, "auto")
    for name, fields in OPTIONS.items():
        as_card = Sampler(VOCAB, device, fused=no_draw)
        here = Sampler(VOCAB, device, truncate_rows=truncate_rows)
        times, ahead = _measure(_Company(sequences, long, fields, as_card), steps, spent)
        drawn, _ = _measure(_Company(sequences, long, fields, here), steps, spent)
        row(name, *map(_ms, times.values()), f"{ahead / steps:.0%}", _ms(drawn["step"]))


def _measure(
    company: _Company, steps: int, spent: dict[str, float]
) -> tuple[dict[str, list[float]], int]:
    """Seconds of each step and of its parts, and how many of the steps were launched ahead."""
    for _ in range(5):
        company.step()
    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {"step": [], **{part: [] for part in PARTS}}
    ahead = 0
    for _ in range(steps):
        spent.clear()
        begun_s = time.thread_time()
        company.step()
        times["step"].append(time.thread_time() - begun_s)
        for part in PARTS:
            times[part].append(spent[part])
        ahead += company.core._ahead is not None
    gc.enable()
    return times, ahead


def _ms(times: list[float]) -> str:
    return f"{1e3 * statistics.median(times):.2f}"


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


class _Company:
    """Sequences that all decode, and tell of their tokens as they do in an engine's process."""

    def __init__(self, count: int, long: int, fields: dict[str, Any], sampler: Sampler) -> None:
        self._told: list[TokensTold | EventTold] = []
        self.core = _core(count, long, fields, sampler, self._told)

    def step(self) -> None:
        """To its message."""
        self._told.clear()
        self.core.step()
        encode(Step(self._told))


def _core(
    count: int,
    long: int,
    fields: dict[str, Any],
    sampler: Sampler,
    told: list[TokensTold | EventTold],
) -> EngineCore:
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
                request,
                ModelFacts("none"),
                (sequence,),
                on_tokens=told.append,
                request_cancel=lambda _: None,
            )
        )
    return core


if __name__ == "__main__":
    main(host_step, "host_step")
