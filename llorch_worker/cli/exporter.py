"""``llorch exporter``: the fleet's metrics for Prometheus."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.settings import Settings

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9390


@settings_options("redis_url")
def exporter(
    settings: Settings,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for any.", min=0, max=65535)
    ] = DEFAULT_PORT,
    as_json: JsonOption = False,
) -> None:
    """Export fleet metrics to Prometheus: queues, workers, saturation, Redis.

    /metrics has the figures. /targets lists the workers that serve their own metrics (HTTP service
    discovery). /health answers while this process lives. The exporter needs no key. With --json,
    it prints its URL once it listens.
    """
    extras.require("metrics")
    from llorch_worker.broker.connections.url import in_brackets
    from llorch_worker.broker.standing_in import standing_in
    from llorch_worker.telemetry.logs.setup import configure
    from llorch_worker.telemetry.metrics.exporter import Exporter

    try:
        server = Exporter(settings.redis_url, host, port)
    except OSError as error:
        raise CommandError(
            "CANNOT_LISTEN",
            f"cannot listen at {in_brackets(host)}:{port}: {error.strerror}; "
            "--port and --host choose another place",
        ) from None
    configure(settings.log_format)
    signal.signal(signal.SIGTERM, _end)
    url = f"http://{in_brackets(host)}:{server.server_port}"
    screen = Screen(as_json=as_json)
    if as_json:
        screen.document({"url": url}, indent=None)
    else:
        screen.note(
            f"The fleet's metrics are at {url}/metrics, its workers at {url}/targets", "bold"
        )
    try:
        _warn_without_redis(settings.redis_url)
        with standing_in(settings):
            server.serve_forever()
    finally:
        server.server_close()


def _warn_without_redis(url: str) -> None:
    from llorch_worker.broker.figures.fleet_client import FleetClient
    from llorch_worker.contract.errors import BrokerUnavailable

    try:
        with FleetClient(url) as client:
            client.ping()
    except BrokerUnavailable as error:
        logger.warning("%s; until then llorch_redis_up is 0", error)


def _end(*_: Any) -> None:
    sys.exit(0)
