"""``python -m benches.peers``: beside what a user would take instead, in one run on one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benches.peers.contestants.roster import PEERS
from benches.peers.lengths import Lengths
from llorch_worker.cli.bench.headings import show_provenance
from llorch_worker.cli.bench.number_list import parse_numbers
from llorch_worker.cli.bench.options import SeedOption
from llorch_worker.cli.options import JsonOption, ModelFileOption, given_options, settings_from
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.command_line import command_line, run
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Dtype

if TYPE_CHECKING:
    from benches.peers.measures import PeersFigures
    from benches.peers.rows import BatchRow, JobsRow, Side

MOST_SEQUENCES = 256
MOST_TOKENS = 100_000
WIDE_SPREAD = 0.25
WIDE_MARK = "*"
DEFAULT_PEERS = "llama.cpp,transformers,transformers-cb,llama-server"


def peers(
    context: typer.Context,
    model: ModelFileOption = None,
    names: Annotated[
        str,
        typer.Option(
            "--peers",
            help="Of llama.cpp, transformers, transformers-cb, llama-server (these by default), "
            "stock-celery.",
            show_default=False,
        ),
    ] = DEFAULT_PEERS,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads of each.")] = 2,
    batch: Annotated[
        str, typer.Option("--batch", help="Sequences that decode: a number, or a list.")
    ] = "1,8,16,32",
    prefill: Annotated[
        int, typer.Option("--prefill", min=1, help="Tokens of the prefill, in one step.")
    ] = 512,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens before a decode.")
    ] = 32,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=3, help="Steps of a decode.")] = 32,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Mixed jobs through servers and queues.")
    ] = 64,
    job_prompt_tokens: Annotated[
        str, typer.Option("--job-prompt-tokens", metavar="LEAST,MOST", help="Of a mixed job.")
    ] = "32,384",
    job_new_tokens: Annotated[
        str, typer.Option("--job-new-tokens", metavar="LEAST,MOST", help="Of a mixed job.")
    ] = "16,128",
    slots: Annotated[
        int, typer.Option("--slots", min=1, help="Jobs that a server runs at once.")
    ] = 16,
    passes: Annotated[
        int, typer.Option("--passes", min=1, help="Passes to take the median of.")
    ] = 3,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", metavar="TYPE", help="Of ours and transformers'.")
    ] = "bfloat16",
    llama_server: Annotated[
        Path | None,
        typer.Option("--llama-server", metavar="PATH", help="Its binary (default: on the PATH)."),
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure prefill, decode and mixed jobs beside llama.cpp and transformers, on the CPU.

    Each runs in a process of its own, with the same file, prompts and threads, ours and theirs by
    turns. stock-celery runs a job at a time and takes long, so it is only measured when named.
    What is not installed or does not fit is skipped with the reason. Lengths that were not given
    are lowered to the model's context.
    """
    screen = Screen(as_json=as_json)
    batches = parse_numbers("--batch", batch, MOST_SEQUENCES)
    wished = Lengths(
        prefill,
        _bounds("--job-prompt-tokens", job_prompt_tokens),
        _bounds("--job-new-tokens", job_new_tokens),
    )
    chosen = _chosen(names)
    settings = settings_from(model=model, device="cpu", dtype=dtype)
    extras.require("worker")
    import torch

    from benches.peers.measures import Plan, measure_peers
    from llorch_worker.bench.jobs.mixed_load import JobLoad
    from llorch_worker.cli.terminal.interrupts import terminable
    from llorch_worker.model import resolve_config
    from llorch_worker.weights import open_checkpoint

    torch.set_num_threads(threads)
    context_tokens = resolve_config(open_checkpoint(settings.model)).max_context
    lengths = wished.fitted(context_tokens, given_options(context))
    if changes := lengths.changes(wished):
        screen.note(f"{' '.join(changes)}: what the model's context of {context_tokens} holds")
    plan = Plan(
        settings=settings,
        peers=chosen,
        batches=batches,
        prefill_tokens=lengths.prefill,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        jobs=JobLoad(jobs, lengths.job_prompt_tokens, lengths.job_new_tokens, seed),
        slots=slots,
        passes=passes,
        threads=threads,
        llama_server=llama_server,
    )
    with terminable():
        figures = measure_peers(plan, lambda what: screen.note(f"measuring {what}"))
    if as_json:
        screen.document(figures.model_dump(mode="json"))
    else:
        _show(screen, figures)


def _chosen(names: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        raise usage_error(f"--peers knows {', '.join(PEERS)} (got {unknown[0][:40]!r})")
    return chosen


def _bounds(option: str, text: str) -> tuple[int, int]:
    numbers = parse_numbers(option, text, MOST_TOKENS)
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise usage_error(f"{option} must be one number, or LEAST,MOST (got {text[:40]!r})")
    return numbers[0], numbers[-1]


def _show(screen: Screen, figures: PeersFigures) -> None:
    from rich.table import Table
    from rich.text import Text

    show_provenance(screen, figures.provenance)
    show = screen.out.print
    show(Text(f"{figures.model.name}  ({', '.join(figures.file_types)})", "bold"))
    kept = ", ".join(f"{name} {version}" for name, version in figures.versions.items())
    if kept:
        show(Text(f"  {kept}"))
    for name, note in figures.notes.items():
        show(Text(f"  {name}: {note}"))
    several = f", medians of {figures.passes} passes by turns (spread)"
    show(
        Text(
            f"  tokens/s{several if figures.passes > 1 else ' of one pass'}; decodes of "
            f"{figures.new_tokens} steps after "
            f"{counted(figures.prompt_tokens, 'token')}\n"
        )
    )
    table = Table("", "peer", box=None, header_style="dim", pad_edge=False)
    for title in ("llorch", "peer's", "llorch/peer"):
        table.add_column(title, justify="right")
    for row in figures.rows:
        match row.kind:
            case "skipped":
                continue
            case "jobs":
                what = counted(row.jobs, "job")
            case "prefill":
                what = f"prefill {row.prompt_tokens}"
            case "decode":
                what = f"decode x{row.sequences}"
        table.add_row(
            what,
            row.peer,
            _rate(row.ours),
            _rate(row.theirs),
            # A place for the mark on every line, so that the figures stay in their column.
            f"{row.ratio:.2f}{WIDE_MARK if _is_wide(row) else ' '}",
        )
    if table.row_count:
        show(table)
    if any(_is_wide(row) for row in figures.rows if row.kind != "skipped"):
        remark = f"{WIDE_MARK} passes spread by more than {WIDE_SPREAD:.0%}: a rough ratio"
        show(Text(remark, "dim"))
    for row in figures.rows:
        if row.kind == "skipped":
            show(Text(f"{row.peer}, {row.what}: skipped: {row.reason}", "yellow"))


def _rate(side: Side) -> str:
    spread = "" if side.spread is None else f" ({side.spread:.0%})"
    return f"{side.tokens_per_s:,.1f}{spread}"


def _is_wide(row: BatchRow | JobsRow) -> bool:
    return max(row.ours.spread or 0, row.theirs.spread or 0) > WIDE_SPREAD


if __name__ == "__main__":
    app = command_line()
    app.command()(peers)
    raise SystemExit(run(app, "python -m benches.peers"))
