"""``llorch bench engine``: tokens a second, latencies, and how close to the machine's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llorch_worker.cli.bench.headings import median_of, show_provenance
from llorch_worker.cli.bench.number_list import parse_numbers
from llorch_worker.cli.bench.options import SeedOption, ThreadsOption
from llorch_worker.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxStepTokensOption,
    ModelFileOption,
    settings_from,
)
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted, human_bytes

if TYPE_CHECKING:
    from llorch_worker.bench.engine import EngineFigures, Row

MAX_CONCURRENCY = 1024


def engine(
    model: ModelFileOption = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt.")
    ] = 128,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Tokens that each request generates.")
    ] = 32,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at once: a number, or a list 1,8,16.")
    ] = "16",
    threads: ThreadsOption = None,
    passes: Annotated[
        int, typer.Option("--passes", min=1, help="Passes to take the median of.")
    ] = 3,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=2.0, help="0 is greedy.")
    ] = 0.0,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    max_step_tokens: MaxStepTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the engine alone, without a queue.

    Prompts are random ids, and no request ends early. Prefill is timed by passes that ask for one
    token, decode where all sequences decode and none prefills; a warm-up comes before and counts
    apart. Bytes and FLOP are those the model's shape calls for, at least; the machine's ceilings
    are measured in the same process.
    """
    screen = Screen(as_json=as_json)
    concurrencies = parse_numbers("--concurrency", concurrency, MAX_CONCURRENCY)
    settings = settings_from(
        model=model, device=device, dtype=dtype, max_step_tokens=max_step_tokens
    )
    extras.require("worker")
    from llorch_worker.bench.engine import Plan, measure_engine
    from llorch_worker.bench.instruments.passes import Load

    plan = Plan(
        settings=settings,
        load=Load(prompt_tokens, new_tokens, max(concurrencies), temperature, seed),
        concurrencies=concurrencies,
        passes=passes,
        threads=threads,
    )
    figures = measure_engine(
        plan,
        screen.loading_bar(f"loading {settings.served_name}"),
        lambda what: screen.note(f"measuring {what}"),
    )
    if as_json:
        screen.document(figures.model_dump(mode="json"))
    else:
        _show(screen, figures)


def _show(screen: Screen, figures: EngineFigures) -> None:
    from rich.table import Table
    from rich.text import Text

    show_provenance(screen, figures.provenance)
    show = screen.out.print
    kinds = ", ".join(figures.file_types)
    show(Text(f"{figures.model}  ({kinds}; {figures.parameters:,} parameters)", "bold"))
    show(
        Text(
            f"  computed in {figures.dtype} on {figures.device}; weights "
            f"{human_bytes(figures.weight_bytes)}, loaded in {figures.load_s:.1f} s\n"
            f"  prompts of {counted(figures.prompt_tokens, 'token')}, "
            f"{counted(figures.new_tokens, 'new one')} each, "
            f"{'greedy' if figures.temperature == 0 else f'temperature {figures.temperature:g}'}; "
            f"{median_of(figures.passes)} after a warm-up\n"
        )
    )
    rows = [row for row in figures.rows if row.kind == "measured"]
    if rows:
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("sequences", style="dim")
        for row in rows:
            table.add_column(str(row.concurrency), justify="right")
        for label, cell in _LINES:
            if label != _SPREAD or figures.passes > 1:
                table.add_row(label, *map(cell, rows))
        show(table)
    for each in figures.rows:
        remarks = (f"skipped: {each.reason}",) if each.kind == "skipped" else each.notes
        for remark in remarks:
            show(Text(f"{counted(each.concurrency, 'sequence')}: {remark}", "yellow"))
    _show_limits(screen, figures)


def _show_limits(screen: Screen, figures: EngineFigures) -> None:
    from rich.text import Text

    ceilings = figures.ceilings
    lines = []
    if ceilings.read_bytes_per_s is not None:
        lines.append(
            f"reads {ceilings.read_bytes_per_s / 1e9:.1f} GB/s "
            f"(an array of {human_bytes(ceilings.read_array_bytes)})"
        )
    shape = " x ".join(f"{size:,}" for size in ceilings.gemm_shape)
    lines.append(
        f"computes {ceilings.flops_per_s / 1e9:,.1f} GFLOP/s ({ceilings.gemm_dtype}, {shape})"
    )
    lines += [] if ceilings.not_measured is None else [ceilings.not_measured]
    if figures.peak_memory_bytes is not None:
        lines.append(f"peak memory of this process {human_bytes(figures.peak_memory_bytes)}")
    if figures.peak_device_memory_bytes is not None:
        lines.append(f"peak memory on the card {human_bytes(figures.peak_device_memory_bytes)}")
    screen.out.print()
    for line in lines:
        screen.out.print(Text(f"  {line}"))


def _rate(tokens_per_s: float | None) -> str:
    return _NOTHING if tokens_per_s is None else f"{tokens_per_s:,.1f}"


def _giga(per_s: float | None) -> str:
    return _NOTHING if per_s is None else f"{per_s / 1e9:,.2f}"


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}"


def _between(row: Row, which: Literal["p50", "p95", "p99"]) -> str:
    gaps = row.between_tokens_ms
    return _NOTHING if gaps is None else f"{getattr(gaps, which):,.2f}"


_NOTHING = "–"
_SPREAD = "  spread of passes"
_LINES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("prefill, tokens/s", lambda row: _rate(row.prefill_tokens_per_s)),
    ("decode, tokens/s", lambda row: _rate(row.decode_tokens_per_s)),
    ("total, tokens/s", lambda row: _rate(row.total_tokens_per_s)),
    (_SPREAD, lambda row: _percent(row.total_spread)),
    ("first token p50, ms", lambda row: f"{row.first_token_ms.p50:,.2f}"),
    ("  p95", lambda row: f"{row.first_token_ms.p95:,.2f}"),
    ("  p99", lambda row: f"{row.first_token_ms.p99:,.2f}"),
    ("between tokens p50, ms", lambda row: _between(row, "p50")),
    ("  p95", lambda row: _between(row, "p95")),
    ("  p99", lambda row: _between(row, "p99")),
    ("decode reads, GB/s", lambda row: _giga(row.decode_read_bytes_per_s)),
    ("  of the machine's", lambda row: _percent(row.decode_read_share)),
    ("prefill computes, GFLOP/s", lambda row: _giga(row.prefill_flops_per_s)),
    ("  of the machine's", lambda row: _percent(row.prefill_flops_share)),
    ("decode step outside the model", lambda row: _percent(row.outside_model_share)),
    ("KV cache at its fullest", lambda row: human_bytes(row.kv_peak_bytes)),
    ("warm-up, s", lambda row: f"{row.warm_up_s:.2f}"),
)
