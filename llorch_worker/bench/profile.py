"""``llorch bench profile``'s measuring: the share of each part in prefill and in decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from llorch_worker.bench.instruments.components import (
    MATRICES_AND_ATTENTION,
    Component,
    Verdict,
    verdict,
)
from llorch_worker.bench.instruments.flamegraph import Flamegraph
from llorch_worker.bench.instruments.loaded_engine import LoadedEngine, engine_for
from llorch_worker.bench.instruments.passes import Load, Pass, run_pass
from llorch_worker.bench.instruments.provenance import Provenance, provenance
from llorch_worker.bench.instruments.ranges import Ranges, forward_range
from llorch_worker.bench.instruments.recording import Recording
from llorch_worker.bench.instruments.shares import StepTimes, step_times
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.model import Llama
from llorch_worker.settings import Settings
from llorch_worker.weights.contents import tensor_types

WARM_UP_TOKENS: Final = 2
SHOWN_OPERATORS: Final = 3
SHOWN_OPERATOR_SHARE: Final = 0.005


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class OperatorShare(_Frozen):
    """An operator of torch's within a component; shares are of the whole step."""

    operator: str
    share: float


class ComponentShare(_Frozen):
    """One component's part of the steps, without what it gave on to other components."""

    component: Component
    share: float
    verdict: Verdict
    ms_per_step: float
    calls_per_step: float
    operators: tuple[OperatorShare, ...]
    """The largest first."""


class PhaseProfile(_Frozen):
    """Prefill, or decode with all sequences. The shares of all components add up to 1."""

    phase: Literal["prefill", "decode"]
    steps: int
    step_ms: float
    """Mean, under the profiler."""
    plain_step_ms: float
    """Mean of the same load's steps without it."""
    components: tuple[ComponentShare, ...]
    """The largest first; ``rest`` is what no other component accounts for."""
    in_python_share: float
    """Time in which no operator of torch's ran: Python, and libraries that it calls directly."""
    elsewhere_share: float
    """Of all but matrix products and attention."""
    refactor_bound: float
    """How many times faster steps were if all but those cost nothing (Amdahl)."""


class ProfileFigures(_Frozen):
    """The document of ``llorch bench profile --json``."""

    provenance: Provenance
    model: Path
    file_types: tuple[str, ...]
    device: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    concurrency: int
    temperature: float
    phases: tuple[PhaseProfile, ...]
    notes: tuple[str, ...]
    flamegraph: Path | None


@dataclass(frozen=True)
class ProfilePlan:
    """What is to be profiled, and where a flamegraph goes, if any."""

    settings: Settings
    load: Load
    threads: int | None
    flamegraph: Flamegraph | None


def measure_profile(
    plan: ProfilePlan, progress: Callable[[int, int], None], now: Callable[[str], None]
) -> ProfileFigures:
    """Load the model, time prefill and decode without the profiler, then again under it.

    ``progress`` is of the load, in bytes; ``now`` is told what begins.
    """
    load, notes = plan.load, []
    # A recorded step that is replayed has no parts that could be told apart.
    settings = plan.settings.model_copy(update={"cuda_graphs": False})
    with engine_for(settings, load, plan.threads, progress) as loaded:
        reason = loaded.no_room(load)
        if reason is not None:
            raise CommandError(
                "OUT_OF_MEMORY",
                f"the load {reason}; lower --concurrency, --prompt-tokens or --new-tokens",
            )
        stats = loaded.engine.stats()
        origin = provenance(device=stats.device, seed=load.seed)
        if loaded.engine.cache.kv.keys.device.type == "cuda":
            notes.append(
                "without CUDA graphs, and waiting for the card after each part: steps take longer "
                "than those of llorch bench engine"
            )
        # Other prompts in each pass: none may profit from what another has left behind.
        loads = (replace(load, seed=seed) for seed in count(load.seed))
        now("a warm-up")
        _run(loaded, replace(next(loads), new_tokens=min(WARM_UP_TOKENS, load.new_tokens)))
        now("prefill")
        phases = [_prefill(loaded, next(loads), next(loads))]
        now("decode")
        decode = _decode(loaded, next(loads), next(loads))
        if decode is None:
            notes.append(
                "no decode shares: in fewer than two steps all sequences decode and none "
                "prefills; raise --new-tokens"
            )
        else:
            phases.append(decode)
        flamegraph = None
        if plan.flamegraph is not None:
            now("a flamegraph")
            with plan.flamegraph.recording() as made:
                _run(loaded, next(loads))
            flamegraph = made.path
            notes += made.notes
    return ProfileFigures(
        provenance=origin,
        model=plan.settings.model,
        file_types=tuple(kind.name for kind in tensor_types(loaded.checkpoint)),
        device=stats.device,
        dtype=stats.dtype,
        prompt_tokens=load.prompt_tokens,
        new_tokens=load.new_tokens,
        concurrency=load.concurrency,
        temperature=load.temperature,
        phases=tuple(phases),
        notes=tuple(notes),
        flamegraph=flamegraph,
    )


def _run(loaded: LoadedEngine, load: Load) -> Pass:
    return run_pass(loaded.engine, loaded.watched, load)


def _prefill(loaded: LoadedEngine, plain_load: Load, load: Load) -> PhaseProfile:
    """Of passes that ask for one token: every step of them prefills."""
    plain = _run(loaded, replace(plain_load, new_tokens=1))
    _, times = _profiled(loaded, replace(load, new_tokens=1), lambda _: True)
    return _phase("prefill", times, plain.wall_s / len(plain.steps))


def _decode(loaded: LoadedEngine, plain_load: Load, load: Load) -> PhaseProfile | None:
    """Of the steps in which all sequences decode; None where there are fewer than two."""
    plain = _run(loaded, plain_load).decode_phase()
    all_decode = forward_range(load.concurrency, load.concurrency)
    profiled, times = _profiled(loaded, load, lambda name: name == all_decode)
    if plain is None or profiled.decode_phase() is None:
        return None
    return _phase("decode", times, plain.step_s)


def _profiled(
    loaded: LoadedEngine, load: Load, wanted: Callable[[str], bool]
) -> tuple[Pass, StepTimes]:
    """One pass under the profiler, and the times of its steps whose forward pass is ``wanted``."""
    model = loaded.watched.model
    if not isinstance(model, Llama):
        raise TypeError(f"a {type(model).__name__} has no parts that are known")
    device = loaded.engine.cache.kv.keys.device
    with Ranges(model, device), Recording(device) as recording:
        done = _run(loaded, load)
    return done, step_times(recording.events(), wanted)


def _phase(
    phase: Literal["prefill", "decode"], times: StepTimes, plain_step_s: float
) -> PhaseProfile:
    shares = sorted(
        (_share(component, times) for component in times.own_us),
        key=lambda each: each.share,
        reverse=True,
    )
    elsewhere = sum(each.share for each in shares if each.component not in MATRICES_AND_ATTENTION)
    return PhaseProfile(
        phase=phase,
        steps=times.steps,
        step_ms=times.wall_us / times.steps / 1e3,
        plain_step_ms=plain_step_s * 1e3,
        components=tuple(shares),
        in_python_share=times.python_us / times.wall_us,
        elsewhere_share=elsewhere,
        refactor_bound=1 / (1 - elsewhere),
    )


def _share(component: Component, times: StepTimes) -> ComponentShare:
    own_us = times.component_us(component)
    share = own_us / times.wall_us
    operators = times.own_us[component].most_common(SHOWN_OPERATORS)
    return ComponentShare(
        component=component,
        share=share,
        verdict=verdict(share),
        ms_per_step=own_us / times.steps / 1e3,
        calls_per_step=times.calls[component] / times.steps,
        operators=tuple(
            OperatorShare(operator=operator, share=operator_us / times.wall_us)
            for operator, operator_us in operators
            if operator_us >= SHOWN_OPERATOR_SHARE * times.wall_us
        ),
    )
