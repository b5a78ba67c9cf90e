"""``llorch load`` and ``llorch unload``: what a worker of several models keeps, by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.settings import Settings

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
WorkerOption = Annotated[
    str | None,
    typer.Option("--worker", metavar="NAME", help="A worker; by default the one with least to do."),
]


@settings_options("redis_url")
def load(
    model: ModelArgument,
    worker: WorkerOption = None,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Have a worker load one of its models now. It changes again as the waiting jobs ask."""
    _tell(settings, model, worker, loads=True, as_json=as_json)


@settings_options("redis_url")
def unload(
    model: ModelArgument,
    worker: WorkerOption = None,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Have a worker end its engine, until jobs for one of its models wait."""
    _tell(settings, model, worker, loads=False, as_json=as_json)


def _tell(
    settings: Settings, model: str, worker: str | None, *, loads: bool, as_json: bool
) -> None:
    from llorch_worker.broker.figures.fleet_client import LOAD_COMMAND, UNLOAD_COMMAND, FleetClient

    screen = Screen(as_json=as_json)
    with FleetClient(settings.redis_url) as client:
        able = [
            card
            for card in client.workers()
            if model in (card.served if loads else (card.model,))
            and worker in (None, card.hostname)
        ]
        if not able:
            who = "no worker" if worker is None else f"no worker {worker[:80]}"
            what = "serves" if loads else "has loaded"
            raise CommandError(
                "MODEL_NOT_SERVED", f"{who} {what} {model[:80]!r}; see llorch status"
            )
        # One that has it already need not change.
        card = min(able, key=lambda each: (loads and each.model != model, each.load, each.hostname))
        command = LOAD_COMMAND if loads else UNLOAD_COMMAND
        refusal = client.tell(card.hostname, command, model=model)
    if refusal is not None:
        raise CommandError("REFUSED", f"{card.hostname} does not: {refusal}")
    if as_json:
        screen.document({"worker": card.hostname, "model": model, "loads": loads})
    else:
        screen.line(f"{card.hostname} {'loads' if loads else 'unloads'} {model}")
