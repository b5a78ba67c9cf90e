"""``llorch gateway``: HTTP in front of the queue."""

from __future__ import annotations

import logging
from traceback import format_exception_only
from typing import Annotated

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import USAGE, CommandError, usage_error
from llorch_worker.contract.errors import as_told
from llorch_worker.settings import Settings

BACKLOG = 2048
STOP_S = 10
"""How long a gateway that is asked to stop waits for answers, before it answers 503."""


@settings_options("redis_url")
def gateway(
    settings: Settings,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [8080].")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve HTTP: OpenAI's API, jobs and batches, for every model behind this Redis.

    Any number of gateways run side by side. Other settings are LLORCH_GATEWAY_* variables. With
    --json, it prints its URL once it listens.
    """
    extras.require("gateway")
    import uvicorn
    from pydantic import ValidationError

    from llorch_worker.broker.connections.url import in_brackets
    from llorch_worker.contract.rules import rule_of
    from llorch_worker.gateway.app import create_app
    from llorch_worker.gateway.connections import connections, raise_file_limit
    from llorch_worker.gateway.loopback import is_loopback
    from llorch_worker.gateway.settings import GatewaySettings
    from llorch_worker.gateway.sockets import Socket
    from llorch_worker.misspelt import warnings
    from llorch_worker.telemetry.logs.setup import configure

    given = {"host": host, "port": port}
    try:
        own = GatewaySettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        faults = "; ".join(
            f"LLORCH_GATEWAY_{str(each['loc'][0]).upper()}: {rule_of(each)}"
            for each in error.errors()
        )
        raise usage_error(faults) from None
    if own.keys is None and not is_loopback(own.host):
        raise CommandError(
            "KEYS_NEEDED",
            f"{own.host} is reachable from elsewhere: set LLORCH_GATEWAY_KEYS to a file of keys, "
            "which `llorch gateway-key` makes",
            USAGE,
        )
    configure(settings.log_format)
    for sentence in warnings(Settings, GatewaySettings):
        logging.getLogger(__name__).warning(sentence)
    logging.getLogger("uvicorn.error").addFilter(_without_refused_sockets)
    logging.getLogger("uvicorn.error").addFilter(_without_query)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_without_message)
    raise_file_limit()
    app = create_app(settings, own)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            own.host,
            own.port,
            # httptools, which uvicorn prefers where it is installed, keeps a header of any size.
            http=connections(own.header_timeout_s, own.waiting_connections),
            ws=Socket,
            # A frame of 8 kB could hold 8 MB, made on the event loop.
            ws_per_message_deflate=False,
            ws_max_size=own.max_body_bytes,
            timeout_keep_alive=own.keep_alive_s,
            log_config=None,
            access_log=False,  # of our own, with the key and the job
            backlog=BACKLOG,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
        )
    )
    screen, host = Screen(as_json=as_json), in_brackets(own.host)
    try:
        sockets = [server.config.bind_socket()]
    except SystemExit:  # uvicorn has logged the reason
        message = f"cannot listen at {host}:{own.port}; --port and --host choose another place"
        raise CommandError("CANNOT_LISTEN", message) from None
    # Before the URL is printed: who connects at once must wait, and not be refused.
    sockets[0].listen(BACKLOG)
    url = f"http://{host}:{sockets[0].getsockname()[1]}"
    if as_json:
        screen.document({"url": url}, indent=None)
    else:
        screen.note(
            f"The gateway and its console are at {url}, all endpoints at {url}/docs",
            "bold",
        )
    server.run(sockets)


def _without_message(record: logging.LogRecord) -> bool:
    """The message of a defect may quote a text, so only the type and the place are logged."""
    if record.exc_info and (error := record.exc_info[1]) is not None:
        record.exc_info = None
        record.exc_text = "".join(format_exception_only(as_told(error, "gateway")))
    return True


def _without_refused_sockets(record: logging.LogRecord) -> bool:
    """uvicorn calls it an error when an app refuses a WebSocket with an answer of its own."""
    return record.msg != "ASGI callable returned without completing handshake."


def _without_query(record: logging.LogRecord) -> bool:
    """uvicorn logs the URL of a WebSocket with its query, which may be anything."""
    match record.args:
        case (client, str(path), *rest) if "WebSocket" in record.msg:
            record.args = (client, path.partition("?")[0], *rest)
    return True


def gateway_key(
    name: Annotated[str, typer.Argument(help="The key's name, such as its owner's.")],
) -> None:
    """Make a key for the gateway. The key is shown once; the file keeps its hash.

    Append the entry to the file that LLORCH_GATEWAY_KEYS names. max_jobs and priority limit the
    key; operator = true shows it the fleet in the console; deleting the entry revokes it.
    """
    from llorch_worker.gateway.keys import new_key

    key, entry = new_key(name)
    limits = "# max_jobs = 100\n# requests_per_minute = 600\n# tokens_per_day = 1000000\n"
    typer.echo(f'{entry}{limits}# priority = "low"\n# operator = true')
    typer.echo(f"\nThe key, which is not stored: {key}", err=True)
