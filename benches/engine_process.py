"""What it costs that a worker's engine has a process of its own: pairs with one in this process.

    python -m benches.engine_process --model FILE [--sequences 1,16] [--threads 2]

Two engines of one file alternate, each warmed again before its pass; new tokens go to a callback,
as in a worker whose jobs nobody reads. The one apart is a worker's, with an intake, and its tokens
come as often as then. The first token counts from the submission, with all that prepares it. The
keeper's processor time is that of this process while the other one computes. Exit code 1 if a token
differs, or what the engines compute with: one may have found no native kernels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benches.command import heading, main, row
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.interface import EngineInterface
from llorch_worker.engine.process.engine_process import EngineProcess
from llorch_worker.intake.process import IntakeProcess
from llorch_worker.settings import Settings

TIMEOUT_S = 600
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    tokens_per_s: float
    first_token_ms: float
    keeper_us: float
    """This process' processor time for each token."""
    texts: list[Ids]


def engine_process(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file or a folder.")],
    sequences: Annotated[str, typer.Option("--sequences", help="How many at once.")] = "1,16",
    tokens: Annotated[int, typer.Option("--tokens", min=2)] = 64,
    passes: Annotated[int, typer.Option("--passes", min=1)] = 9,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
) -> int:
    """Tokens a second and the first token beside and within a process: alternating passes."""
    counts = [int(count) for count in sequences.split(",")]
    options: dict[str, Any] = {"device": "cpu", "max_context": 1024, "max_sequences": max(counts)}
    options |= {"drafter": "off", "num_threads": threads}
    different: list[str] = []
    # First, so that its children's threads are not this engine's.
    told_every_s = Settings.model_fields["flush_interval_ms"].default / 1e3
    with (
        IntakeProcess(model) as intake,
        EngineProcess.load(model, intake=intake, told_every_s=told_every_s, **options) as apart,
        Engine.load(model, **options) as here,
    ):
        engines: tuple[EngineInterface, EngineInterface] = here, apart
        found = [(engine.facts.fingerprint, engine.facts.arithmetic) for engine in engines]
        if found[0] != found[1]:
            print(f"not comparable: here {', '.join(found[0])}; apart {', '.join(found[1])}")
            return 1
        print(f"both: {', '.join(found[0])}\n")
        heading(
            "sequences", "here, tokens/s", "apart, tokens/s", "ratio", "first", "keeper, us a token"
        )
        for engine in engines:
            engine.warm_up()
        seeds = numbers(1)
        for count in counts:
            runs = [partial(_warm_run, engine, count=count, tokens=tokens) for engine in engines]
            given = [next(seeds) for _ in range(passes)]
            pairs = list(alternate(runs[0], runs[1], given))
            for at, (ours, theirs) in enumerate(pairs):
                if ours.texts != theirs.texts:
                    place = first_difference(ours.texts, theirs.texts)
                    different.append(f"pass {at} of {count} sequences, {place}")
            speeds = [median(pair[i].tokens_per_s for pair in pairs) for i in (0, 1)]
            ratio = median(b.tokens_per_s / a.tokens_per_s for a, b in pairs)
            first = median(b.first_token_ms / a.first_token_ms for a, b in pairs)
            keeper_us = median(theirs.keeper_us for _, theirs in pairs)
            row(
                count,
                *(f"{speed:.1f}" for speed in speeds),
                f"{ratio:.3f}",
                f"{first:.3f}",
                f"{keeper_us:.0f}",
            )
    print(f"{len(different)} passes with other tokens")
    if different:
        print(f"the first: {different[0]}")
    return int(bool(different))


def first_difference(ours: Sequence[Ids], theirs: Sequence[Ids]) -> str:
    """Where texts begin to differ, counted from 0."""
    sequence = [one == other for one, other in zip(ours, theirs, strict=True)].index(False)
    same = [one == other for one, other in zip(ours[sequence], theirs[sequence], strict=False)]
    return f"sequence {sequence}, token {[*same, False].index(False)}"


def _warm_run(engine: EngineInterface, seed: int, count: int, tokens: int) -> Pass:
    """After a short one: the other engine's pass left its weights in the processors' caches."""
    _run(engine, seed, count, tokens=2)
    return _run(engine, seed, count, tokens)


def _run(engine: EngineInterface, seed: int, count: int, tokens: int) -> Pass:
    requests = [
        GenerationRequest(
            prompt=f"{number} Once upon a time", max_tokens=tokens, ignore_eos=True, seed=seed
        )
        for number in range(count)
    ]
    begun_s, used_s = time.perf_counter(), time.process_time()
    running = [
        engine.submit(
            request, queued_at=time.time(), on_event=lambda _: None, on_tokens=lambda _: None
        )
        for request in requests
    ]
    ended = [generation.result(TIMEOUT_S) for generation in running]
    took_s, used_s = time.perf_counter() - begun_s, time.process_time() - used_s
    return Pass(
        tokens_per_s=count * tokens / took_s,
        first_token_ms=median(result.timings.first_token_ms for result in ended),
        keeper_us=used_s / (count * tokens) * 1e6,
        texts=[result.choices[0].token_ids for result in ended],
    )


if __name__ == "__main__":
    main(engine_process, "engine_process")
