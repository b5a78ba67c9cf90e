"""``python -m benches.peers``: the engine against its alternatives, on one model file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benches.command import main
from benches.peers.contestants.roster import PEERS
from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.bench.parameters import PassesOption, SeedOption, parse_numbers
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.interrupts import terminable
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import INTERRUPTED, usage_error
from llorch_worker.engine_options import Dtype
from llorch_worker.settings import Settings

MOST_SEQUENCES = 256
MOST_TOKENS = 100_000


@settings_options("model", "kv_dtype")
def peers(
    settings: Settings,
    names: Annotated[
        str,
        typer.Option(
            "--peers",
            help=f"Any of {', '.join(PEERS)} (the default).",
            show_default=False,
        ),
    ] = ",".join(PEERS),
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads for each.")] = 2,
    batch: Annotated[
        str, typer.Option("--batch", help="Sequences that decode: a number, or a list.")
    ] = "1,8,16,32",
    prefill: Annotated[
        int, typer.Option("--prefill", min=1, help="Tokens of a prefill in one step.")
    ] = 512,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens before a decode.")
    ] = 32,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=3, help="Steps of a decode.")] = 32,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Number of mixed jobs for servers and queues.")
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
    passes: PassesOption = 3,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", metavar="TYPE", help="Dtype of ours and transformers.")
    ] = "bfloat16",
    llama_server: Annotated[
        Path | None,
        typer.Option("--llama-server", metavar="PATH", help="Its binary (default: on the PATH)."),
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure prefill, decode and mixed jobs beside llama.cpp and transformers, on the CPU.

    Each runs in its own process, with the same file, prompts and threads. Peers run one at a time;
    passes alternate. Peers that are not installed or do not fit are skipped with the reason. Each
    pass is printed as it ends. An interrupt still prints the table, of what was measured.
    """
    screen = Screen(as_json=as_json)
    batches = parse_numbers("--batch", batch, MOST_SEQUENCES)
    bounds = (
        _bounds("--job-prompt-tokens", job_prompt_tokens),
        _bounds("--job-new-tokens", job_new_tokens),
    )
    chosen = _chosen(names)
    settings = settings.model_copy(update={"device": "cpu", "dtype": dtype})
    import torch

    from benches.peers.figures import Wanted
    from benches.peers.measures import measure_peers
    from llorch_worker.bench.load import Load

    torch.set_num_threads(threads)
    wanted = Wanted(
        peers=chosen,
        batches=batches,
        prefill_tokens=prefill,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        jobs=Load(jobs, *bounds, seed),
        slots=slots,
        threads=threads,
        llama_server=llama_server,
    )
    plan = parameters.plan(screen, settings, passes, threads)
    with terminable():
        figures = measure_peers(plan, wanted, lambda line: None if as_json else screen.line(line))
    print_figures(screen, figures)
    if figures.interrupted:
        raise SystemExit(INTERRUPTED)


def _chosen(names: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        raise usage_error(f"unknown peer {unknown[0][:40]!r}; allowed: {', '.join(PEERS)}")
    return chosen


def _bounds(option: str, text: str) -> tuple[int, int]:
    numbers = parse_numbers(option, text, MOST_TOKENS)
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise usage_error(f"{option} must be one number, or LEAST,MOST (got {text[:40]!r})")
    return numbers[0], numbers[-1]


if __name__ == "__main__":
    main(peers, "peers")
