"""The cost of a token as the queue or the context grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from rich.console import RenderableType

from llorch_worker.bench.instruments.loaded_engine import LoadedEngine, engine_for
from llorch_worker.bench.instruments.percentiles import spread_of
from llorch_worker.bench.instruments.provenance import Figures, Frozen, provenance
from llorch_worker.bench.instruments.timed_load import Load, Pass, run_pass
from llorch_worker.bench.tables import median_of, table, title
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings


class QueuedRow(Frozen):
    """One number of requests, all submitted at once."""

    queued: int
    tokens_per_s: float
    """Generated tokens, from submission to the last token; median over the passes."""
    spread: float | None
    """Largest minus smallest of the passes, as a share of the median; None for one pass."""
    cost: float
    """Cost of a token relative to the first row; always 1 if cost grows linearly."""


class ContextRow(Frozen):
    """One request that fills this much of the context."""

    context_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_cost: float
    decode_cost: float
    """Cost of a token relative to the first row."""


class ScalingFigures(Figures):
    """The document of ``python -m benches.scaling --json``."""

    model: Path
    dtype: str
    concurrency: int
    prompt_tokens: int
    new_tokens: int
    passes: int
    queued: tuple[QueuedRow, ...]
    contexts: tuple[ContextRow, ...]

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.model} as {self.dtype}; {median_of(self.passes)}")
        yield (
            f"  queued requests: prompts of {counted(self.prompt_tokens, 'token')}, "
            f"{counted(self.new_tokens, 'new one')}, "
            f"{counted(self.concurrency, 'sequence')} at once\n"
        )
        yield table(
            [("queued", ","), ("tokens/s", ",.1f"), ("spread", ".1%"), ("cost of a token", "")],
            [(row.queued, row.tokens_per_s, row.spread, f"{row.cost:.2f}x") for row in self.queued],
            words=0,
        )
        yield ""
        rates = [
            ("prefill, tokens/s", ",.1f"),
            ("cost", ""),
            ("decode, tokens/s", ",.1f"),
            ("cost", ""),
        ]
        yield table(
            [("context", ","), *rates],
            [
                (
                    *(row.context_tokens, row.prefill_tokens_per_s, f"{row.prefill_cost:.2f}x"),
                    *(row.decode_tokens_per_s, f"{row.decode_cost:.2f}x"),
                )
                for row in self.contexts
            ],
            words=0,
        )


@dataclass(frozen=True)
class Plan:
    """What to measure. Each of ``contexts`` is more than ``new_tokens``."""

    settings: Settings
    queued: tuple[int, ...]
    contexts: tuple[int, ...]
    concurrency: int
    prompt_tokens: int
    new_tokens: int
    passes: int
    threads: int | None
    seed: int


def measure_scaling(
    plan: Plan, progress: Callable[[int, int], None], now: Callable[[str], None]
) -> ScalingFigures:
    """Measure straight through the engine. ``progress`` receives the load's progress in bytes;
    ``now`` the name of each phase.

    Raises:
        CommandError: a context is longer than the model's own, or memory is too short.
    """
    longest = max(plan.prompt_tokens + plan.new_tokens, *plan.contexts)
    room = Load(longest - plan.new_tokens, plan.new_tokens, plan.concurrency, 0.0, plan.seed)
    with engine_for(plan.settings, room, plan.threads, progress) as loaded:
        stats = loaded.engine.stats()
        runner = _Runner(loaded, plan)
        queued, contexts = [], []
        for jobs in plan.queued:
            now(counted(jobs, "request"))
            queued.append((jobs, runner.run(plan.prompt_tokens, jobs)))
        for tokens in plan.contexts:
            now(f"a context of {tokens} tokens")
            contexts.append((tokens, runner.run(tokens - plan.new_tokens, 1)))
        return ScalingFigures(
            provenance=provenance(
                device=stats.device,
                seed=plan.seed,
                program=("python", "-m", "benches.scaling"),
            ),
            model=plan.settings.model,
            dtype=stats.dtype,
            concurrency=plan.concurrency,
            prompt_tokens=plan.prompt_tokens,
            new_tokens=plan.new_tokens,
            passes=plan.passes,
            queued=tuple(_queued_rows(queued)),
            contexts=tuple(_context_rows(contexts)),
        )


class _Runner:
    def __init__(self, loaded: LoadedEngine, plan: Plan) -> None:
        self._loaded = loaded
        self._plan = plan
        self._seeds = count(plan.seed)

    def run(self, prompt_tokens: int, requests: int) -> list[Pass]:
        """Runs passes with different prompts, after a warm-up of the same shapes."""
        self._pass(prompt_tokens, min(requests, self._plan.concurrency))
        return [self._pass(prompt_tokens, requests) for _ in range(self._plan.passes)]

    def _pass(self, prompt_tokens: int, requests: int) -> Pass:
        load = Load(prompt_tokens, self._plan.new_tokens, requests, 0.0, next(self._seeds))
        return run_pass(self._loaded.engine, self._loaded.watched, load)


def _queued_rows(measured: list[tuple[int, list[Pass]]]) -> Iterator[QueuedRow]:
    first: float | None = None
    for queued, passes in measured:
        rates = [queued * each.load.new_tokens / each.wall_s for each in passes]
        rate = median(rates)
        first = first or rate
        yield QueuedRow(
            queued=queued,
            tokens_per_s=rate,
            spread=spread_of(rates),
            cost=first / rate,
        )


def _context_rows(measured: list[tuple[int, list[Pass]]]) -> Iterator[ContextRow]:
    first: tuple[float, float] | None = None
    for context, passes in measured:
        prefill = median(each.load.prompt_tokens / each.first_token_s[0] for each in passes)
        decode = median((each.load.new_tokens - 1) / _decode_s(each) for each in passes)
        first = first or (prefill, decode)
        yield ContextRow(
            context_tokens=context,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
            prefill_cost=first[0] / prefill,
            decode_cost=first[1] / decode,
        )


def _decode_s(single: Pass) -> float:
    (times_s,) = single.token_times_s
    return times_s[-1] - times_s[0]
