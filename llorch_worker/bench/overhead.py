"""``llorch bench overhead``'s measuring: what a decode step costs outside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from llorch_worker.bench.instruments.loaded_engine import engine_for
from llorch_worker.bench.instruments.no_op_model import NoOpModel, no_op_engine
from llorch_worker.bench.instruments.passes import DecodePhase, Load, run_pass
from llorch_worker.bench.instruments.percentiles import Percentiles, percentiles_ms
from llorch_worker.bench.instruments.provenance import Provenance, provenance
from llorch_worker.bench.instruments.watched_model import WatchedModel
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.engine import Engine
from llorch_worker.model import resolve_config
from llorch_worker.settings import DEFAULT_MAX_STEP_TOKENS, Settings
from llorch_worker.weights import open_checkpoint

VOCABULARIES = (512, 32000)
PROMPT_TOKENS = 16
WARM_UP_STEPS = 8
NO_OP = "no-op"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: each way costs its own."""

    name: str
    temperature: float
    fields: Mapping[str, Any] = field(default_factory=dict)


SAMPLINGS = (
    Sampling("greedy", 0.0),
    Sampling("greedy, penalties", 0.0, {"repetition_penalty": 1.1, "frequency_penalty": 0.1}),
    Sampling("greedy, logprobs 5", 0.0, {"logprobs": 5}),
    Sampling("greedy, 2 stop strings", 0.0, {"stop": ("\n\n", "User:")}),
    Sampling("temperature 1", 1.0),
    Sampling("min_p 0.05", 1.0, {"min_p": 0.05}),
    Sampling("top_k 40", 1.0, {"top_k": 40}),
    Sampling("top_p 0.9", 1.0, {"top_p": 0.9}),
    Sampling("top_k 40, top_p 0.9", 1.0, {"top_k": 40, "top_p": 0.9}),
)


class OverheadRow(BaseModel):
    """Decode steps of one vocabulary and way of sampling, all sequences together."""

    model_config = ConfigDict(frozen=True)

    model: str
    vocab_size: int
    sampling: str
    steps: int
    outside_model_ms: Percentiles
    """From the end of one forward pass to the start of the next."""
    outside_model_mean_ms: float
    step_mean_ms: float
    share: float | None
    """Of the step; None for the no-op model, of whose step it is nearly all."""


class OverheadFigures(BaseModel):
    """The document of ``llorch bench overhead --json``."""

    model_config = ConfigDict(frozen=True)

    provenance: Provenance
    sequences: int
    rows: tuple[OverheadRow, ...]


def measure_overhead(
    *,
    sequences: int,
    steps: int,
    seed: int,
    settings: Settings | None,
    progress: Callable[[int, int], None],
) -> OverheadFigures:
    """``settings``: of a real model to measure too, or None. torch's threads stay as they are.

    Raises:
        CommandError: the real model's context is too short for so many steps.
    """
    if settings is not None:
        _check_context(settings, _context(steps, sequences))
    rows: list[OverheadRow] = []
    for vocab_size in VOCABULARIES:
        watched = WatchedModel(NoOpModel(vocab_size, sequences, seed))
        with no_op_engine(
            watched, vocab_size, sequences=sequences, context_tokens=_context(steps, sequences)
        ) as engine:
            rows += _rows(engine, watched, NO_OP, sequences, steps, seed)
    device = "cpu"
    if settings is not None:
        load = Load(PROMPT_TOKENS, _new_tokens(steps, sequences), sequences, 0.0, seed)
        # Prefill is not looked at here, and takes as many steps as around no model.
        alike = settings.model_copy(update={"max_step_tokens": DEFAULT_MAX_STEP_TOKENS})
        with engine_for(alike, load, None, progress) as real:
            device = real.engine.stats().device
            rows += _rows(real.engine, real.watched, settings.served_name, sequences, steps, seed)
    return OverheadFigures(
        provenance=provenance(device=device, seed=seed), sequences=sequences, rows=tuple(rows)
    )


def _check_context(settings: Settings, needed: int) -> None:
    """At once, and not when the rows without a model have been measured."""
    own = resolve_config(open_checkpoint(settings.model)).max_context
    if needed > own:
        raise usage_error(
            f"so many steps need a context of {needed} tokens, and the model's own is {own}; lower "
            "--steps or --concurrency"
        )


def _new_tokens(steps: int, sequences: int) -> int:
    """So many that ``steps`` gaps between steps are left after prefill and warm-up."""
    prefill_steps = 1 + sequences * PROMPT_TOKENS // DEFAULT_MAX_STEP_TOKENS
    return prefill_steps + WARM_UP_STEPS + steps + 1


def _context(steps: int, sequences: int) -> int:
    return PROMPT_TOKENS + _new_tokens(steps, sequences)


def _rows(
    engine: Engine, watched: WatchedModel, name: str, sequences: int, steps: int, seed: int
) -> Iterator[OverheadRow]:
    for sampling in SAMPLINGS:
        load = Load(
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=_new_tokens(steps, sequences),
            concurrency=sequences,
            temperature=sampling.temperature,
            seed=seed,
            fields=sampling.fields,
        )
        phase = run_pass(engine, watched, load).decode_phase()
        if phase is None or len(phase.steps) <= steps:
            raise CommandError(
                "NOT_MEASURED",
                f"{name}: there were not {steps} steps in which all {sequences} sequences "
                "decode; lower --steps or --concurrency",
            )
        yield _row(name, engine.config.vocab_size, sampling, DecodePhase(phase.steps[-steps - 1 :]))


def _row(name: str, vocab_size: int, sampling: Sampling, phase: DecodePhase) -> OverheadRow:
    outside_s = phase.outside_model_s
    return OverheadRow(
        model=name,
        vocab_size=vocab_size,
        sampling=sampling.name,
        steps=len(outside_s),
        outside_model_ms=percentiles_ms(outside_s),
        outside_model_mean_ms=fmean(outside_s) * 1e3,
        step_mean_ms=phase.step_s * 1e3,
        share=None if name == NO_OP else fmean(outside_s) / phase.step_s,
    )
