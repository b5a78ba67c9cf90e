"""``python -m benches.battle``: ours, then stock Celery, with the same load and the same kills."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benches.battle.battle import Outcome, fight
from benches.battle.fleet import OURS, Terms, ours, stock
from benches.battle.report import BattleFigures
from benches.command import main
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.bench.parameters import SeedOption
from llorch_worker.cli.options import JsonOption
from llorch_worker.cli.terminal.interrupts import terminable
from llorch_worker.cli.terminal.screen import Screen

PACKAGES = ("celery", "kombu", "redis")


def battle(
    only_ours: Annotated[bool, typer.Option("--ours", help="Without stock Celery.")] = False,
    only_stock: Annotated[bool, typer.Option("--stock", help="Only stock Celery.")] = False,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Give ours also what users of Celery do besides.")
    ] = False,
    minutes: Annotated[float, typer.Option(help="Duration of load and kills.")] = 5.0,
    kills: Annotated[int | None, typer.Option(help="By default one a second.")] = None,
    workers: int = 3,
    seed: SeedOption = 1,
    as_json: JsonOption = False,
    keep: Annotated[Path | None, typer.Option(help="Folder for ledgers and logs.")] = None,
) -> int:
    """Strike workers under load and audit what became of every job; 1 if ours broke a promise."""
    strikes = round(60 * minutes) if kills is None else kills
    terms = Terms(minutes, strikes, workers, seed=seed, mixed=mixed)
    both = only_ours == only_stock
    contestants = [ours(terms)] * (both or only_ours) + [stock(terms)] * (both or only_stock)
    folder = keep or Path(tempfile.mkdtemp(prefix="llorch-battle-"))
    outcomes: list[Outcome] = []
    kept = keep is not None
    try:
        with terminable():
            for contestant in contestants:
                place = folder / contestant.name.replace(" ", "-")
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                outcomes.append(fight(contestant, terms, place))
        broken = any(each.contestant == OURS and not each.clean for each in outcomes)
        kept = kept or broken
    except RuntimeError:
        kept = True
        raise
    finally:
        if kept:
            print(f"ledgers and logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    origin = provenance(
        device="cpu", seed=seed, program=("python", "-m", "benches.battle"), measured_with=PACKAGES
    )
    figures = BattleFigures(provenance=origin, terms=terms, battles=tuple(outcomes))
    print_figures(Screen(as_json=as_json), figures)
    return int(broken)


if __name__ == "__main__":
    main(battle, "battle")
