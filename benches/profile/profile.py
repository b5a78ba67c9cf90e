"""The shares of a step's time, in prefill and in decode, with and without the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final, Literal

from rich.console import RenderableType
from rich.text import Text

from benches.profile.ranges import Component, Ranges, forward_range
from benches.profile.step_times import StepTimes, recording, step_times
from llorch_worker.bench.instruments.loaded_engine import LoadedEngine, engine_for
from llorch_worker.bench.instruments.provenance import Figures, Frozen, provenance
from llorch_worker.bench.instruments.timed_load import WARM_UP_TOKENS, Pass, run_pass
from llorch_worker.bench.load import Load
from llorch_worker.bench.plan import Plan
from llorch_worker.bench.tables import remark, table, title
from llorch_worker.contract.quantities import counted
from llorch_worker.model import Transformer
from llorch_worker.weights.contents import tensor_types

MATRICES_AND_ATTENTION: Final = frozenset(
    {
        Component.QKV,
        Component.ATTENTION,
        Component.ATTENTION_OUTPUT,
        Component.GATE_UP,
        Component.DOWN,
        Component.OUTPUT_MATRIX,
    }
)
"""Components that rearranging the code around them cannot make faster."""
CRITICAL_SHARE: Final = 0.10
"""A part above it is worth optimising."""


class ComponentShare(Frozen):
    """One component's part of the steps, without the components that it calls."""

    component: Component
    share: float
    ms_per_step: float
    calls_per_step: float


class PhaseProfile(Frozen):
    """Prefill, or decode with all sequences. The shares of all components add up to 1."""

    phase: Literal["prefill", "decode"]
    steps: int
    step_ms: float
    """Mean time under the profiler."""
    plain_step_ms: float
    """Mean time of the same load's steps without the profiler."""
    components: tuple[ComponentShare, ...]
    """Largest first; ``rest`` is the time that no other component accounts for."""
    in_python_share: float
    """Time outside torch's operators: Python, and libraries that it calls directly."""
    elsewhere_share: float
    """Share of everything except matrix products and attention."""
    refactor_bound: float
    """How many times faster steps would be if that share cost nothing (Amdahl)."""

    def parts(self) -> Iterator[RenderableType]:
        critical = [each.component for each in self.components if each.share > CRITICAL_SHARE]
        yield title(
            f"\n{self.phase}: {counted(self.steps, 'step')} of {self.step_ms:,.2f} ms "
            f"({self.plain_step_ms:,.2f} ms without the profiler)"
        )
        yield Text(f"  above 10%: {', '.join(critical) or 'nothing'}")
        yield table(
            [("part", ""), ("share", ".1%"), ("ms a step", ",.3f"), ("calls", ",.0f")],
            [
                (each.component.value, each.share, each.ms_per_step, each.calls_per_step or None)
                for each in self.components
            ],
        )
        yield Text(
            f"  {self.in_python_share:.1%} of the time outside torch's operators; "
            f"{self.elsewhere_share:.1%} outside matrix products\n  and attention: without that, "
            f"a step would be {self.refactor_bound:.2f} times as fast",
            "dim",
        )


class ProfileFigures(Figures):
    """The document of ``python -m benches.profile --json``."""

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

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.model}  ({', '.join(self.file_types)})")
        yield (
            f"  computed in {self.dtype} on {self.device}; "
            f"{counted(self.concurrency, 'prompt')} of {counted(self.prompt_tokens, 'token')}, "
            f"{counted(self.new_tokens, 'new one')} each"
        )
        for phase in self.phases:
            yield from phase.parts()
        yield from map(remark, self.notes)


def measure_profile(plan: Plan, load: Load) -> ProfileFigures:
    """Load the model, time prefill and decode without the profiler, then again under it."""
    notes = []
    # A step replayed from a CUDA graph cannot be divided into parts.
    plan = replace(plan, settings=plan.settings.model_copy(update={"cuda_graphs": False}))
    with engine_for(plan, load) as loaded:
        stats = loaded.engine.stats()
        origin = provenance(
            device=stats.device, seed=load.seed, program=("python", "-m", "benches.profile")
        )
        if loaded.engine.cache.shape.device.type == "cuda":
            notes.append(
                "CUDA graphs are off, and each part waits for the card: steps take longer than "
                "those of llorch bench engine"
            )
        model = loaded.watched.model
        if isinstance(model, Transformer) and model.native is not None:
            loaded.watched.model = replace(model, native=None)
            notes.append("the layers run one operation at a time; a worker's run in one call")
        # Each pass has its own prompts, so that none finds another's in the prefix cache.
        loads = (replace(load, seed=seed) for seed in count(load.seed))
        plan.now("a warm-up")
        few = min(WARM_UP_TOKENS, load.new_tokens[0])
        run_pass(loaded.engine, loaded.watched, replace(next(loads), new_tokens=(few, few)))
        plan.now("prefill")
        phases = [_prefill(loaded, next(loads), next(loads))]
        plan.now("decode")
        if decode := _decode(loaded, next(loads), next(loads)):
            phases.append(decode)
        else:
            notes.append(
                "no decode shares: all sequences decode together in fewer than two steps; "
                "raise --new-tokens"
            )
    return ProfileFigures(
        provenance=origin,
        model=plan.settings.model,
        file_types=tuple(kind.name for kind in tensor_types(loaded.checkpoint)),
        device=stats.device,
        dtype=stats.dtype,
        prompt_tokens=load.prompt_tokens[0],
        new_tokens=load.new_tokens[0],
        concurrency=load.jobs,
        temperature=load.temperature,
        phases=tuple(phases),
        notes=tuple(notes),
    )


def _prefill(loaded: LoadedEngine, plain_load: Load, load: Load) -> PhaseProfile:
    """The times of passes that ask for one token, in which every step prefills."""
    plain = run_pass(loaded.engine, loaded.watched, replace(plain_load, new_tokens=(1, 1)))
    _, times = _profiled(loaded, replace(load, new_tokens=(1, 1)), lambda _: True)
    return _phase("prefill", times, plain.wall_s / len(plain.steps))


def _decode(loaded: LoadedEngine, plain_load: Load, load: Load) -> PhaseProfile | None:
    """The times of the steps in which all sequences decode; None if there are fewer than two."""
    plain = run_pass(loaded.engine, loaded.watched, plain_load).decode_phase()
    all_decode = forward_range(load.jobs, load.jobs)
    profiled, times = _profiled(loaded, load, lambda name: name == all_decode)
    if plain is None or profiled.decode_phase() is None:
        return None
    return _phase("decode", times, plain.step_s)


def _profiled(
    loaded: LoadedEngine, load: Load, wanted: Callable[[str], bool]
) -> tuple[Pass, StepTimes]:
    """One pass under the profiler, and the times of its steps whose forward pass is ``wanted``."""
    model = loaded.watched.model
    if not isinstance(model, Transformer):
        raise TypeError(f"the parts of a {type(model).__name__} are unknown")
    device = loaded.engine.cache.shape.device
    with Ranges(model, device), recording(device) as profiler:
        done = run_pass(loaded.engine, loaded.watched, load)
    return done, step_times(profiler.events() or (), wanted)


def _phase(
    phase: Literal["prefill", "decode"], times: StepTimes, plain_step_s: float
) -> PhaseProfile:
    components = [
        ComponentShare(
            component=component,
            share=own_us / times.wall_us,
            ms_per_step=own_us / times.steps / 1e3,
            calls_per_step=times.calls[component] / times.steps,
        )
        for component, own_us in sorted(times.own_us.items(), key=lambda each: -each[1])
    ]
    elsewhere = sum(e.share for e in components if e.component not in MATRICES_AND_ATTENTION)
    return PhaseProfile(
        phase=phase,
        steps=times.steps,
        step_ms=times.wall_us / times.steps / 1e3,
        plain_step_ms=plain_step_s * 1e3,
        components=tuple(components),
        in_python_share=times.python_us / times.wall_us,
        elsewhere_share=elsewhere,
        refactor_bound=1 / (1 - elsewhere),
    )
