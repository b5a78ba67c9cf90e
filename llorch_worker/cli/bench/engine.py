"""``llorch bench engine``: tokens per second, latencies, and shares of the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import (
    Cell,
    median_of,
    print_figures,
    remark,
    shown,
    table,
    title,
)
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llorch_worker.bench.engine import EngineFigures, Row

MAX_CONCURRENCY = 1024


@settings_options("model", "device", "dtype", "max_step_tokens")
def engine(
    settings: Settings,
    prompt_tokens: parameters.PromptTokensOption = 128,
    new_tokens: parameters.NewTokensOption = 32,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at once: a number, or a list: 1,8,16.")
    ] = "16",
    threads: parameters.ThreadsOption = None,
    passes: parameters.PassesOption = 3,
    temperature: parameters.TemperatureOption = 0.0,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure the engine alone, without a queue.

    Prompts are random ids, and no request ends early. Passes that ask for one token time prefill.
    Decode is timed while all sequences decode and none prefills. A warm-up runs first and is
    reported separately. Bytes and FLOP are the minimum for the model's shape; the same process
    measures the machine's ceilings.
    """
    screen = Screen(as_json=as_json)
    concurrencies = parameters.parse_numbers("--concurrency", concurrency, MAX_CONCURRENCY)
    extras.require("worker")
    from llorch_worker.bench.engine import Plan, measure_engine
    from llorch_worker.bench.instruments.timed_load import Load

    load = Load(prompt_tokens, new_tokens, max(concurrencies), temperature, seed)
    figures = measure_engine(
        Plan(settings, load, concurrencies, passes, threads),
        screen.loading_bar(f"loading {settings.served_name}"),
        lambda what: screen.note(f"measuring {what}"),
    )
    print_figures(screen, figures, _lay_out)


def _lay_out(figures: EngineFigures) -> Iterator[RenderableType]:
    kinds = ", ".join(figures.file_types)
    greedy = "greedy" if figures.temperature == 0 else f"temperature {figures.temperature:g}"
    yield title(f"{figures.model}  ({kinds}; {figures.parameters:,} parameters)")
    yield (
        f"  computed in {figures.dtype} on {figures.device}; weights "
        f"{human_bytes(figures.weight_bytes)}, loaded in {figures.load_s:.1f} s\n"
        f"  prompts of {counted(figures.prompt_tokens, 'token')}, "
        f"{counted(figures.new_tokens, 'new one')} each, {greedy}; "
        f"{median_of(figures.passes)} after a warm-up\n"
    )
    rows = [row for row in figures.rows if row.kind == "measured"]
    lines = [(label, *(shown(cell(row), form) for row in rows)) for label, form, cell in _LINES]
    if rows:
        yield table(
            [("sequences", ""), *((str(row.concurrency), "") for row in rows)],
            [line for line in lines if any(cell is not None for cell in line[1:])],
        )
    for each in figures.rows:
        for text in (f"skipped: {each.reason}",) if each.kind == "skipped" else each.notes:
            yield remark(f"{counted(each.concurrency, 'sequence')}: {text}")
    yield ""
    yield from _limits(figures)


def _limits(figures: EngineFigures) -> Iterator[str]:
    ceilings = figures.ceilings
    if ceilings.read_bytes_per_s is not None:
        size = human_bytes(ceilings.read_array_bytes)
        yield f"  reads {ceilings.read_bytes_per_s / 1e9:.1f} GB/s (an array of {size})"
    shape = " x ".join(f"{size:,}" for size in ceilings.gemm_shape)
    rate = f"{ceilings.flops_per_s / 1e9:,.1f} GFLOP/s"
    yield f"  computes {rate} ({ceilings.gemm_dtype}, {shape})"
    if ceilings.not_measured is not None:
        yield f"  {ceilings.not_measured}"
    if figures.peak_memory_bytes is not None:
        yield f"  peak memory of this process {human_bytes(figures.peak_memory_bytes)}"
    if figures.peak_device_memory_bytes is not None:
        yield f"  peak memory on the card {human_bytes(figures.peak_device_memory_bytes)}"


def _giga(per_s: float | None) -> float | None:
    return None if per_s is None else per_s / 1e9


def _between(row: Row, which: str) -> float | None:
    return getattr(row.between_tokens_ms, which, None)


_LINES: tuple[tuple[str, str, Callable[[Row], Cell]], ...] = (
    ("prefill, tokens/s", ",.1f", lambda row: row.prefill_tokens_per_s),
    ("decode, tokens/s", ",.1f", lambda row: row.decode_tokens_per_s),
    ("total, tokens/s", ",.1f", lambda row: row.total_tokens_per_s),
    ("  spread of passes", ".1%", lambda row: row.total_spread),
    ("first token p50, ms", ",.2f", lambda row: row.first_token_ms.p50),
    ("  p95", ",.2f", lambda row: row.first_token_ms.p95),
    ("  p99", ",.2f", lambda row: row.first_token_ms.p99),
    ("between tokens p50, ms", ",.2f", lambda row: _between(row, "p50")),
    ("  p95", ",.2f", lambda row: _between(row, "p95")),
    ("  p99", ",.2f", lambda row: _between(row, "p99")),
    ("decode reads, GB/s", ",.2f", lambda row: _giga(row.decode_read_bytes_per_s)),
    ("  of the machine's", ".1%", lambda row: row.decode_read_share),
    ("prefill computes, GFLOP/s", ",.2f", lambda row: _giga(row.prefill_flops_per_s)),
    ("  of the machine's", ".1%", lambda row: row.prefill_flops_share),
    ("decode step outside the model", ".1%", lambda row: row.outside_model_share),
    ("KV cache at its fullest", "", lambda row: human_bytes(row.kv_peak_bytes)),
    ("warm-up, s", ".2f", lambda row: row.warm_up_s),
)
