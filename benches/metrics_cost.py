"""What metrics cost a worker.

    python -m benches.metrics_cost [--model FILE] [--pairs 20] [--sequences 16] [--tokens 200]

The same load runs on one engine with and without an observer of its steps, by turns, in one
process; the side that goes first alternates. The ratio of tokens/s of each pair and the CPU seconds
a token show what the whole costs, as far as the machine's noise allows. The observer's own time is
measured directly: a call with a step like those of the load, against the time of such a step.
Beside them: the end of a job, and a scrape. Bound: at most 0.5% of the engine's tokens.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from prometheus_client import generate_latest

from benches.arguments import existing_path, known_errors
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.broker.ended_jobs import EndedJob
from llorch_worker.contract import GenerationRequest, Timings, Usage
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine import Engine
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.scheduler import Chunk, StepPlan
from llorch_worker.engine.sequence import Sequence
from llorch_worker.telemetry.metrics.step_figures import StepFigures
from llorch_worker.telemetry.metrics.worker_metrics import WorkerFigures, WorkerMetrics

PROMPT_TOKENS = 32
CALLS = 20_000
SCRAPES = 50
SCRAPE_EVERY_S = 15.0


@dataclass(frozen=True)
class Ran:
    """One load: tokens, wall and CPU seconds of the process, engine steps."""

    tokens: int
    wall_s: float
    cpu_s: float
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description="What metrics cost a worker.")
    parser.add_argument("--model", type=existing_path, default=STORY_MODEL)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    size = options.sequences, options.tokens
    with Engine.load(
        options.model,
        options.device,
        options.dtype,
        max_sequences=options.sequences,
        num_threads=options.threads,
    ) as engine:
        figures = StepFigures()
        _load(engine, None, *size)  # warms up
        pairs = list(
            alternate(
                lambda _: _load(engine, figures, *size),
                lambda _: _load(engine, None, *size),
                range(options.pairs),
            )
        )
        step_s = median(off.wall_s / off.steps for _, off in pairs)
        step_cpu_s = median(off.cpu_s / off.steps for _, off in pairs)
        call_s = _observer_s(engine, options.sequences)
        end_s, scrape_s = _ends_and_scrapes_s(engine, figures)
        stats = engine.stats()
    print(f"command: {shlex.join(sys.orig_argv)}")
    print(
        f"{stats.model}: {stats.dtype} on {stats.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    print(
        f"{options.pairs} pairs of {options.sequences} sequences, {PROMPT_TOKENS} + "
        f"{options.tokens} tokens each; quartiles"
    )
    _print("tokens/s, metrics on", [on.tokens / on.wall_s for on, _ in pairs], "{:,.0f}")
    _print("tokens/s, metrics off", [off.tokens / off.wall_s for _, off in pairs], "{:,.0f}")
    ratios = [(on.tokens / on.wall_s) / (off.tokens / off.wall_s) for on, off in pairs]
    _print("tokens/s, on / off", ratios, "{:.4f}")
    _print("CPU us a token, on", [1e6 * on.cpu_s / on.tokens for on, _ in pairs], "{:.1f}")
    _print("CPU us a token, off", [1e6 * off.cpu_s / off.tokens for _, off in pairs], "{:.1f}")
    ratios = [(on.cpu_s / on.tokens) / (off.cpu_s / off.tokens) for on, off in pairs]
    _print("CPU a token, on / off", ratios, "{:.4f}")
    print(
        f"the observer: {1e9 * call_s:,.0f} ns a step, {1e9 * call_s / options.sequences:,.0f} ns "
        f"a token. A step without it takes {1e6 * step_s:,.0f} us, {1e6 * step_cpu_s:,.0f} us of "
        f"CPU: {call_s / step_s:.4%} of the time, {call_s / step_cpu_s:.4%} of the CPU"
    )
    print(f"the end of a job: {1e6 * end_s:.1f} us")
    print(
        f"a scrape: {1e3 * scrape_s:.2f} ms; every {SCRAPE_EVERY_S:.0f} s "
        f"{scrape_s / SCRAPE_EVERY_S:.4%} of a core"
    )


def _load(engine: Engine, observer: StepFigures | None, sequences: int, tokens: int) -> Ran:
    engine.observe(observer)
    chance = random.Random(0)
    requests = [
        GenerationRequest(
            prompt_token_ids=[
                chance.randrange(3, engine.config.vocab_size) for _ in range(PROMPT_TOKENS)
            ],
            max_tokens=tokens,
            seed=number,
            ignore_eos=True,
        )
        for number in range(sequences)
    ]
    steps = engine.stats().steps_total
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    generations = [engine.submit(request) for request in requests]
    for generation in generations:
        generation.result()
    return Ran(
        tokens=sequences * tokens,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
        steps=engine.stats().steps_total - steps,
    )


def _observer_s(engine: Engine, count: int) -> float:
    """CPU seconds of a call for a step that decodes ``count`` sequences."""
    request = GenerationRequest(prompt_token_ids=[1], max_tokens=1)
    sequences = [
        Sequence([1], request, seed=0, text=ChoiceText(engine.tokenizer)) for _ in range(count)
    ]
    plan = StepPlan(tuple(Chunk(sequence, 0, 1) for sequence in sequences), count)
    figures = StepFigures()
    rounds = []
    for _ in range(5):
        began_s = time.thread_time()
        for _ in range(CALLS // 5):
            figures.step(plan, sequences, time.monotonic())
        rounds.append((time.thread_time() - began_s) / (CALLS // 5))
    return median(rounds)


def _ends_and_scrapes_s(engine: Engine, figures: StepFigures) -> tuple[float, float]:
    """CPU seconds that the end of a job takes, and a scrape."""

    def read() -> WorkerFigures:
        return WorkerFigures(engine.stats(), 1, 0, 0, 0, 0.0, 0.0)

    metrics = WorkerMetrics(engine.model_name, read, figures)
    job = EndedJob(
        id="job",
        model=engine.model_name,
        worker="worker",
        attempts=1,
        ended_at=0.0,
        outcome="length",
        usage=Usage(prompt=1, completion=1),
        timings=Timings(queue_ms=1, prefill_ms=1, first_token_ms=2, decode_ms=3),
    )
    began_s = time.thread_time()
    for _ in range(CALLS):
        metrics.job_ended(job)
    end_s = (time.thread_time() - began_s) / CALLS
    scrapes = []
    for _ in range(SCRAPES):
        began_s = time.thread_time()
        generate_latest(metrics.registry)
        scrapes.append(time.thread_time() - began_s)
    return end_s, median(scrapes)


def _print(what: str, values: list[float], form: str) -> None:
    low, middle, high = (form.format(cut) for cut in quantiles(values, n=4))
    print(f"{what:24} {low} - {middle} - {high}")


if __name__ == "__main__":
    with known_errors():
        main()
