"""``python -m benches.cpu_limits``: the processor's limits, and the most tokens/s that follow.

It measures the instructions that the native kernels multiply with, in registers alone, and the
reading of memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.command_line import command_line, run
from llorch_worker.cli.terminal.screen import Screen


def cpu_limits(
    models: Annotated[
        list[Path] | None,
        typer.Option("--model", metavar="FILE", help="Prints its bounds; may be repeated."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads (default: torch's).")
    ] = None,
    passes: Annotated[
        int, typer.Option("--passes", min=1, help="Short ones; the best counts.")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """Measure this processor's multiply-adds in registers and its reading of memory.

    For each model: the most tokens per second that follow, if only matrix products took time.
    """
    extras.require("worker")
    import torch

    from benches.cpu_limits.bounds import Matrices
    from benches.cpu_limits.figures import CpuLimits
    from benches.cpu_limits.rates import INSTRUCTIONS, measure_rates, runnable_variants
    from llorch_worker.bench.instruments.provenance import provenance

    if threads is not None:
        torch.set_num_threads(threads)
    # Before a minute of measuring: a file may be missing.
    matrices = [Matrices.of(model) for model in models or ()]
    machine = provenance(device="cpu", seed=0, program=("python", "-m", "benches.cpu_limits"))
    products, read_bytes = measure_rates(torch.get_num_threads(), passes)
    figures = CpuLimits(
        provenance=machine,
        passes=passes,
        products=tuple(products),
        read_bytes=read_bytes,
        not_measured=tuple(each for each in runnable_variants() if each not in INSTRUCTIONS),
        models=tuple(each.bounds(products, read_bytes) for each in matrices),
    )
    print_figures(Screen(as_json=as_json), figures)


if __name__ == "__main__":
    app = command_line()
    app.command()(cpu_limits)
    raise SystemExit(run(app, "python -m benches.cpu_limits"))
