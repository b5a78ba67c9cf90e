"""``llorch load``, ``unload`` and ``reload``: what workers keep loaded, by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.screen import Screen
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
    from llorch_worker.broker.figures.fleet_client import FleetClient

    with FleetClient(settings.redis_url) as client:
        _say(client.load(model, worker), "loads", model, as_json=as_json)


@settings_options("redis_url")
def unload(
    model: ModelArgument,
    worker: WorkerOption = None,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Have a worker end its engine, until jobs for one of its models wait."""
    from llorch_worker.broker.figures.fleet_client import FleetClient

    with FleetClient(settings.redis_url) as client:
        _say(client.unload(model, worker), "unloads", model, as_json=as_json)


@settings_options("redis_url")
def reload(
    model: ModelArgument,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="NAME", help="One worker instead of all.")
    ] = None,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Have the workers of a model load the new weights that its files hold.

    The old ones serve until then. llorch status shows why a worker keeps them.
    """
    from llorch_worker.broker.figures.fleet_client import FleetClient

    with FleetClient(settings.redis_url) as client:
        workers = client.reload(model, worker)
    if as_json:
        Screen(as_json=True).document({"workers": workers, "model": model, "does": "reloads"})
    else:
        for each in workers:
            _say(each, "reloads", model, as_json=False)


def _say(worker: str, does: str, model: str, *, as_json: bool) -> None:
    screen = Screen(as_json=as_json)
    if as_json:
        screen.document({"worker": worker, "model": model, "does": does})
    else:
        screen.line(f"{worker} {does} {model}")
