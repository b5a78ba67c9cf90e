"""``llorch bench overhead``: the cost of a decode step outside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from rich.console import RenderableType

from llorch_worker.bench.instruments.loaded_engine import engine_for, own_context
from llorch_worker.bench.instruments.no_op_engine import NoOpModel, no_op_engine
from llorch_worker.bench.instruments.percentiles import Percentiles, percentiles_ms
from llorch_worker.bench.instruments.provenance import Figures, Frozen, provenance
from llorch_worker.bench.instruments.timed_load import DecodePhase, Load, run_pass
from llorch_worker.bench.instruments.watched_model import WatchedModel
from llorch_worker.bench.tables import table, title
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.quantities import counted
from llorch_worker.engine import Engine
from llorch_worker.settings import DEFAULT_MAX_STEP_TOKENS, Settings

VOCABULARIES = (512, 32000)
PROMPT_TOKENS = 16
WARM_UP_STEPS = 8
NO_OP = "no-op"
SAMPLINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "greedy": (0.0, {}),
    "greedy, penalties": (0.0, {"repetition_penalty": 1.1, "frequency_penalty": 0.1}),
    "greedy, logprobs 5": (0.0, {"logprobs": 5}),
    "greedy, 2 stop strings": (0.0, {"stop": ("\n\n", "User:")}),
    "temperature 1": (1.0, {}),
    "min_p 0.05": (1.0, {"min_p": 0.05}),
    "top_k 40": (1.0, {"top_k": 40}),
    "top_p 0.9": (1.0, {"top_p": 0.9}),
    "top_k 40, top_p 0.9": (1.0, {"top_k": 40, "top_p": 0.9}),
}
"""Temperature and further request fields, because each way of sampling has its own cost."""


class OverheadRow(Frozen):
    """Decode steps with one vocabulary and one way of sampling, for all sequences together."""

    model: str
    vocab_size: int
    sampling: str
    steps: int
    outside_model_ms: Percentiles
    """From the end of one forward pass to the start of the next."""
    outside_model_mean_ms: float
    step_mean_ms: float
    share: float | None
    """Share of the step; None for the no-op model, whose step is nearly all overhead."""


class OverheadFigures(Figures):
    """The document of ``llorch bench overhead --json``."""

    sequences: int
    rows: tuple[OverheadRow, ...]

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"A decode step of {counted(self.sequences, 'sequence')} outside the model")
        yield table(
            [
                *(("model", ""), ("vocabulary", ","), ("sampling", ""), ("ms p50", ".3f")),
                *(("p95", ".3f"), ("p99", ".3f"), ("mean", ".3f"), ("of a step", ".1%")),
            ],
            [
                (
                    *(row.model, row.vocab_size, row.sampling),
                    *(*row.outside_model_ms.in_order, row.outside_model_mean_ms, row.share),
                )
                for row in self.rows
            ],
            words=3,
        )


def measure_overhead(
    sequences: int,
    steps: int,
    seed: int,
    settings: Settings | None,
    progress: Callable[[int, int], None],
) -> OverheadFigures:
    """Measure the overhead around no-op models, and around the model of ``settings``, if any.

    Raises:
        CommandError: the real model's context is too short for the steps.
    """
    load = Load(PROMPT_TOKENS, _new_tokens(steps, sequences), sequences, 0.0, seed)
    context_tokens = load.prompt_tokens + load.new_tokens
    if settings is not None and context_tokens > (own := own_context(settings)):
        raise usage_error(
            f"these steps need a context of {context_tokens} tokens, but the model's own is "
            f"{own}; lower --steps or --concurrency"
        )
    rows: list[OverheadRow] = []
    for vocab_size in VOCABULARIES:
        watched = WatchedModel(NoOpModel(vocab_size, sequences, seed))
        with no_op_engine(
            watched, vocab_size, sequences=sequences, context_tokens=context_tokens
        ) as engine:
            rows += _rows(engine, watched, NO_OP, load, steps)
    device = "cpu"
    if settings is not None:
        # As many prefill steps as around the no-op model.
        alike = settings.model_copy(update={"max_step_tokens": DEFAULT_MAX_STEP_TOKENS})
        with engine_for(alike, load, None, progress) as real:
            device = real.engine.stats().device
            rows += _rows(real.engine, real.watched, settings.served_name, load, steps)
    return OverheadFigures(
        provenance=provenance(device=device, seed=seed), sequences=sequences, rows=tuple(rows)
    )


def _new_tokens(steps: int, sequences: int) -> int:
    """Enough tokens to leave ``steps`` gaps between steps after prefill and warm-up."""
    prefill_steps = 1 + sequences * PROMPT_TOKENS // DEFAULT_MAX_STEP_TOKENS
    return prefill_steps + WARM_UP_STEPS + steps + 1


def _rows(
    engine: Engine, watched: WatchedModel, name: str, load: Load, steps: int
) -> Iterator[OverheadRow]:
    for sampling, (temperature, fields) in SAMPLINGS.items():
        sampled = replace(load, temperature=temperature, fields=fields)
        phase = run_pass(engine, watched, sampled).decode_phase()
        if phase is None or len(phase.steps) <= steps:
            raise CommandError(
                "NOT_MEASURED",
                f"{name}: all {load.concurrency} sequences decode together in fewer than {steps} "
                "steps; lower --steps or --concurrency",
            )
        phase = DecodePhase(phase.steps[-steps - 1 :])
        outside_s = phase.outside_model_s
        yield OverheadRow(
            model=name,
            vocab_size=engine.config.vocab_size,
            sampling=sampling,
            steps=len(outside_s),
            outside_model_ms=percentiles_ms(outside_s),
            outside_model_mean_ms=fmean(outside_s) * 1e3,
            step_mean_ms=phase.step_s * 1e3,
            share=None if name == NO_OP else fmean(outside_s) / phase.step_s,
        )
