"""``llorch bench engine``: a model under loads of increasing concurrency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean, median

import torch

from llorch_worker.bench.engine_figures import EngineFigures, Row, Skipped
from llorch_worker.bench.instruments.ceilings import Ceilings, measure_ceilings
from llorch_worker.bench.instruments.loaded_engine import LoadedEngine, engine_for
from llorch_worker.bench.instruments.model_costs import decode_step_bytes, prefill_flops
from llorch_worker.bench.instruments.percentiles import percentiles_ms, spread_of
from llorch_worker.bench.instruments.process_memory import peak_resident_bytes
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.bench.instruments.timed_load import Load, Pass, run_pass
from llorch_worker.contract.quantities import counted
from llorch_worker.engine import Engine
from llorch_worker.settings import Settings
from llorch_worker.weights.contents import file_bytes, stored_numbers, tensor_types

WARM_UP_TOKENS = 2
"""Enough to run the shapes of prefill and of decode once."""


@dataclass(frozen=True)
class Plan:
    """The loads to measure."""

    settings: Settings
    load: Load
    """Runs once for each of ``concurrencies``."""
    concurrencies: tuple[int, ...]
    passes: int
    threads: int | None


@dataclass(frozen=True)
class _Measured:
    """The passes of one concurrency; prefill passes ask for one token each."""

    warm_up_s: float
    prefill: list[Pass]
    full: list[Pass]


def measure_engine(
    plan: Plan, progress: Callable[[int, int], None], now: Callable[[str], None]
) -> EngineFigures:
    """Load the model, run all passes, then measure the machine's ceilings.

    ``progress`` receives the load's progress in bytes; ``now`` the name of each phase.
    """
    largest = replace(plan.load, concurrency=max(plan.concurrencies))
    with engine_for(plan.settings, largest, plan.threads, progress) as loaded:
        engine = loaded.engine
        device = engine.cache.kv.keys.device
        origin = provenance(device=engine.stats().device, seed=plan.load.seed)
        seeds = count(plan.load.seed)
        measured: list[_Measured | Skipped] = []
        for concurrency in plan.concurrencies:
            now(counted(concurrency, "sequence"))
            load = replace(plan.load, concurrency=concurrency)
            measured.append(_passes(loaded, load, plan.passes, seeds))
        peaks = (
            peak_resident_bytes(),
            (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None),
        )
        now("the machine's ceilings")
        ceilings = measure_ceilings(device, engine.cache.kv.dtype)
        stats = engine.stats()
        return EngineFigures(
            provenance=origin,
            model=plan.settings.model,
            file_types=tuple(kind.name for kind in tensor_types(loaded.checkpoint)),
            file_bytes=file_bytes(loaded.checkpoint),
            parameters=stored_numbers(loaded.checkpoint),
            device=stats.device,
            dtype=stats.dtype,
            prompt_tokens=plan.load.prompt_tokens,
            new_tokens=plan.load.new_tokens,
            temperature=plan.load.temperature,
            passes=plan.passes,
            load_s=loaded.load_s,
            ceilings=ceilings,
            weight_bytes=stats.bytes["weights"],
            kv_bytes=stats.bytes["kv"],
            rows=tuple(
                each if isinstance(each, Skipped) else _row(engine, each, ceilings)
                for each in measured
            ),
            peak_memory_bytes=peaks[0],
            peak_device_memory_bytes=peaks[1],
        )


def _passes(
    loaded: LoadedEngine, load: Load, passes: int, seeds: Iterator[int]
) -> _Measured | Skipped:
    reason = loaded.no_room(load)
    if reason is not None:
        return Skipped(concurrency=load.concurrency, reason=reason)

    def run(new_tokens: int) -> Pass:
        # Each pass has its own prompts, so that none finds another's in the prefix cache.
        one = replace(load, new_tokens=new_tokens, seed=next(seeds))
        return run_pass(loaded.engine, loaded.watched, one)

    warm_up = run(min(WARM_UP_TOKENS, load.new_tokens))
    return _Measured(
        warm_up_s=warm_up.wall_s,
        prefill=[run(1) for _ in range(passes)],
        full=[run(load.new_tokens) for _ in range(passes)],
    )


def _row(engine: Engine, measured: _Measured, ceilings: Ceilings) -> Row:
    load, stats = measured.full[0].load, engine.stats()
    prefill_s = median(each.wall_s for each in measured.prefill)
    flops_per_s = prefill_flops(engine, load.concurrency, load.prompt_tokens) / prefill_s
    tokens = load.concurrency * (load.prompt_tokens + load.new_tokens)
    totals = [tokens / each.wall_s for each in measured.full]
    phases = [phase for each in measured.full if (phase := each.decode_phase()) is not None]
    preemptions = sum(each.preemptions for each in measured.full)
    notes: list[str] = []
    step_s = read_bytes_per_s = outside_share = None
    if len(phases) == len(measured.full):
        step_s = median(phase.step_s for phase in phases)
        context_tokens = fmean(phase.mean_context_tokens for phase in phases)
        read_bytes_per_s = decode_step_bytes(engine, load.concurrency, context_tokens) / step_s
        outside_share = median(fmean(each.outside_model_s) / each.step_s for each in phases)
    elif preemptions:
        notes.append("no decode figures: requests were preempted for lack of KV blocks")
    else:
        notes.append(
            "no decode figures: all sequences decode together in fewer than two steps; "
            "raise --new-tokens"
        )
    read_share = _share(read_bytes_per_s, ceilings.read_bytes_per_s)
    flops_share = _share(flops_per_s, ceilings.flops_per_s)
    busy = "the machine was busy when its ceilings were measured"
    if (read_share or 0) > 1:
        notes.append(f"reads above 100%: the model fits into the processor's caches, or {busy}")
    if (flops_share or 0) > 1:
        notes.append(
            f"computes above 100%: quantised matrices multiply as 8-bit integers, faster than "
            f"{ceilings.gemm_dtype}, or {busy}"
        )
    firsts_s = [first for each in measured.full for first in each.first_token_s]
    between_s = [gap for each in measured.full for gap in each.between_tokens_s]
    peak_blocks = max(step.kv_blocks for each in measured.full for step in each.steps)
    return Row(
        concurrency=load.concurrency,
        warm_up_s=measured.warm_up_s,
        prefill_tokens_per_s=load.concurrency * load.prompt_tokens / prefill_s,
        decode_tokens_per_s=None if step_s is None else load.concurrency / step_s,
        total_tokens_per_s=median(totals),
        total_spread=spread_of(totals),
        first_token_ms=percentiles_ms(firsts_s),
        between_tokens_ms=percentiles_ms(between_s) if between_s else None,
        decode_read_bytes_per_s=read_bytes_per_s,
        decode_read_share=read_share,
        prefill_flops_per_s=flops_per_s,
        prefill_flops_share=flops_share,
        outside_model_share=outside_share,
        kv_peak_bytes=stats.bytes["kv"] // stats.kv_blocks_total * peak_blocks,
        kv_peak_share=peak_blocks / stats.kv_blocks_total,
        preemptions=preemptions,
        notes=tuple(notes),
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None else part / whole
