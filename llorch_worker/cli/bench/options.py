"""Options that all benchmarks share."""

from __future__ import annotations

from typing import Annotated

import typer

ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="torch's CPU threads (default: its own).")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of prompts and samples.")]
