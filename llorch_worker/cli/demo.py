"""``llorch demo``: the whole way of a job on this machine, in under a minute."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, settings_from
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import GenerationResult, LlorchError
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.settings import DEMO_MODEL
from llorch_worker.stack import ports

if TYPE_CHECKING:
    from llorch_worker.bench.load import Figures, Measured
    from llorch_worker.cli.demo_screen import DemoScreen
    from llorch_worker.stack.stack import Stack

READY_TIMEOUT_S = 120.0


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything up until Ctrl-C.")] = False,
    flower_port: Annotated[
        int | None, typer.Option("--flower-port", help="Flower's port (default: 5555 or next).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start Redis, a worker and Flower; send 32 jobs, stream one, measure all; stop everything."""
    extras.require("worker")
    from llorch_worker.cli.demo_screen import DemoScreen
    from llorch_worker.stack.interrupts import terminable
    from llorch_worker.stack.stack import Plan, Stack

    screen = Screen(as_json=as_json)
    # The demo is about the shipped model, whatever LLORCH_MODEL says.
    settings = settings_from(model=DEMO_MODEL, model_name="demo")
    flower = not extras.missing_modules("flower")
    plan = Plan(
        settings=settings,
        workers=(("worker", settings.device),),
        redis_url=None,
        flower_port=ports.choose(flower_port, ports.DEFAULT_FLOWER_PORT, "--flower-port")
        if flower
        else None,
        flower_port_asked=flower_port is not None,
    )
    view = DemoScreen(screen)
    with terminable(), Stack(plan, lambda _name, _line: None) as stack:
        _start(view, stack)
        measured, found = _run(view, stack)
        if as_json:
            screen.document(_document(stack.flower_url, found, measured))
        else:
            view.report(found, measured, None if keep else stack.flower_url)
        if keep:
            view.keeping(stack.redis_url, stack.flower_url)
            try:
                stack.keep_up(lambda text: screen.note(text, "yellow"))
            except KeyboardInterrupt:
                stack.drain()
    if found.failed:
        raise CommandError("DEMO_FAILED", f"{found.failed} of {found.jobs} jobs failed")


def _start(view: DemoScreen, stack: Stack) -> None:
    with view.step("Redis") as done:
        stack.start()
        done(stack.redis_url)
    with view.step("worker") as done:
        began_s = time.monotonic()
        (worker,) = stack.wait_ready(READY_TIMEOUT_S)
        seconds = time.monotonic() - began_s
        done(f"{worker.model} on {worker.device}, ready after {seconds:.1f} s")
    if stack.flower_port is None:
        view.without_flower()
        return
    with view.step("Flower") as done:
        stack.wait_for_flower(READY_TIMEOUT_S)
        done(stack.flower_url or "")


def _run(view: DemoScreen, stack: Stack) -> tuple[list[Measured], Figures]:
    import asyncio

    from llorch_worker.bench.load import figures, run_jobs
    from llorch_worker.cli.demo_jobs import demo_jobs

    requests = demo_jobs()
    with view.jobs(requests[0], len(requests)) as (on_event, on_end):
        measured, wall_s = asyncio.run(
            run_jobs(stack.redis_url, "demo", requests, on_event=on_event, on_end=on_end)
        )
    return measured, figures(measured, wall_s)


def _document(flower: str | None, found: Figures, measured: list[Measured]) -> dict[str, Any]:
    return {
        **asdict(found),
        "jobs_per_s": found.jobs_per_s,
        "tokens_per_s": found.tokens_per_s,
        "flower": flower,
        "errors": [
            job.end.document().model_dump(mode="json")
            for job in measured
            if isinstance(job.end, LlorchError)
        ],
        "texts": [job.end.text for job in measured if isinstance(job.end, GenerationResult)],
    }
