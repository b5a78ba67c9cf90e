"""``llorch bench engine``: a model under loads of increasing concurrency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean, median

import torch

from llorch_worker.bench.engine_figures import EngineFigures, Row
from llorch_worker.bench.instruments.ceilings import Ceilings, measure_ceilings
from llorch_worker.bench.instruments.loaded_engine import LoadedEngine, engine_for
from llorch_worker.bench.instruments.model_costs import decode_step_bytes, prefill_flops
from llorch_worker.bench.instruments.percentiles import percentiles_ms, spread_of
from llorch_worker.bench.instruments.process_memory import peak_resident_bytes
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.bench.instruments.timed_load import WARM_UP_TOKENS, Pass, run_pass
from llorch_worker.bench.load import Load
from llorch_worker.bench.plan import Plan
from llorch_worker.contract.quantities import counted
from llorch_worker.engine import Engine
from llorch_worker.weights.contents import file_bytes, stored_numbers, tensor_types


@dataclass(frozen=True)
class _Measured:
    """The passes of one concurrency; prefill passes ask for one token each."""

    load: Load
    warm_up_s: float
    prefill: list[Pass]
    full: list[Pass]


def measure_engine(plan: Plan, load: Load, concurrencies: Sequence[int]) -> EngineFigures:
    """Run ``load``, with equal lengths, once for each of ``concurrencies``, then measure the
    machine's ceilings."""
    largest = replace(load, jobs=max(concurrencies))
    with engine_for(plan, largest) as loaded:
        engine, checkpoint = loaded.engine, loaded.checkpoint
        device = engine.cache.shape.device
        origin = provenance(device=engine.stats().device, seed=load.seed)
        seeds = count(load.seed)
        measured: list[_Measured] = []
        for concurrency in concurrencies:
            plan.now(counted(concurrency, "sequence"))
            measured.append(_passes(loaded, replace(load, jobs=concurrency), plan.passes, seeds))
        peak_bytes = peak_resident_bytes()
        on_card = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        plan.now("the machine's ceilings")
        ceilings = measure_ceilings(device, engine.cache.kv.dtype)
        stats = engine.stats()
        return EngineFigures(
            provenance=origin,
            model=plan.settings.model,
            file_types=tuple(kind.name for kind in tensor_types(checkpoint)),
            file_bytes=file_bytes(checkpoint),
            parameters=stored_numbers(checkpoint),
            device=stats.device,
            dtype=stats.dtype,
            prompt_tokens=load.prompt_tokens[0],
            new_tokens=load.new_tokens[0],
            temperature=load.temperature,
            passes=plan.passes,
            load_s=loaded.load_s,
            ceilings=ceilings,
            weight_bytes=stats.bytes["weights"],
            kv_bytes=stats.bytes["kv"],
            rows=tuple(_row(engine, each, ceilings) for each in measured),
            peak_memory_bytes=peak_bytes,
            peak_device_memory_bytes=on_card,
        )


def _passes(loaded: LoadedEngine, load: Load, passes: int, seeds: Iterator[int]) -> _Measured:
    def run(new_tokens: int) -> Pass:
        # Each pass has its own prompts, so that none finds another's in the prefix cache.
        one = replace(load, new_tokens=(new_tokens,) * 2, seed=next(seeds))
        return run_pass(loaded.engine, loaded.watched, one)

    new_tokens = load.new_tokens[0]
    return _Measured(
        load=load,
        warm_up_s=run(min(WARM_UP_TOKENS, new_tokens)).wall_s,
        prefill=[run(1) for _ in range(passes)],
        full=[run(new_tokens) for _ in range(passes)],
    )


def _row(engine: Engine, measured: _Measured, ceilings: Ceilings) -> Row:
    load, full, stats = measured.load, measured.full, engine.stats()
    sequences, prompt_tokens = load.jobs, load.prompt_tokens[0]
    prefill_s = median(each.wall_s for each in measured.prefill)
    flops_per_s = sequences * prefill_flops(engine.config, prompt_tokens) / prefill_s
    totals = [sequences * load.longest_tokens / each.wall_s for each in full]
    phases = [phase for each in full if (phase := each.decode_phase()) is not None]
    preemptions = sum(each.preemptions for each in full)
    notes: list[str] = []
    step_s = read_bytes_per_s = outside_share = None
    if len(phases) == len(full):
        step_s = median(phase.step_s for phase in phases)
        context_tokens = fmean(phase.mean_context_tokens for phase in phases)
        read_bytes_per_s = decode_step_bytes(engine, sequences, context_tokens) / step_s
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
    between_s = [gap for each in full for gap in each.between_tokens_s]
    peak_blocks = max(step.kv_blocks for each in full for step in each.steps)
    return Row(
        concurrency=sequences,
        warm_up_s=measured.warm_up_s,
        prefill_tokens_per_s=sequences * prompt_tokens / prefill_s,
        decode_tokens_per_s=None if step_s is None else sequences / step_s,
        total_tokens_per_s=median(totals),
        total_spread=spread_of(totals),
        first_token_ms=percentiles_ms([first for each in full for first in each.first_token_s]),
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
