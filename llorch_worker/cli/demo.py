"""``llorch demo``: Redis, a worker, a gateway and 32 jobs on this machine, in under a minute."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llorch_worker.cli.options import (
    FlowerPortOption,
    GatewayPortOption,
    JsonOption,
    settings_from,
)
from llorch_worker.cli.terminal import extras, servers
from llorch_worker.cli.terminal.interrupts import terminable, uninterrupted_exit
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import GenerationRequest, GenerationResult, LlorchError
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.settings import DEMO_MODEL
from llorch_worker.stack.programs import FLOWER, GATEWAY

if TYPE_CHECKING:
    from llorch_worker.bench.jobs.client_load import Figures, Measured
    from llorch_worker.cli.demo_screen import DemoScreen
    from llorch_worker.stack.stack import Stack

READY_TIMEOUT_S = 120.0
JOBS = 32

_OPENINGS = ("One day", "There was", "A little", "The dragon", "Long ago", "A tiny snail")
_TEMPERATURES = (0.0, 0.6, 0.9, 1.2)
_LENGTHS_TOKENS = (48, 96, 192, 320)


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep all running until Ctrl-C.")] = False,
    flower_port: FlowerPortOption = None,
    gateway_port: GatewayPortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start Redis, a worker, a gateway and Flower, run and measure 32 jobs, and stop everything."""
    extras.require("worker")
    from llorch_worker.cli.demo_screen import DemoScreen
    from llorch_worker.stack.stack import Plan, Stack

    screen = Screen(as_json=as_json)
    # The demo always runs the shipped model and ignores LLORCH_MODEL.
    settings = settings_from(model=DEMO_MODEL, model_name="demo")
    plan = Plan(
        settings=settings,
        workers=(("worker", settings.device),),
        redis_url=None,
        flower_port=servers.server_port(FLOWER, flower_port),
        flower_port_asked=flower_port is not None,
        gateway_port=servers.server_port(GATEWAY, gateway_port),
        gateway_port_asked=gateway_port is not None,
    )
    view = DemoScreen(screen)
    with terminable(), uninterrupted_exit(Stack(plan, lambda _name, _line: None)) as stack:
        _start(view, stack)
        measured, found = _run(view, stack)
        if as_json:
            screen.document(_document(stack, found, measured))
        else:
            view.report(found, measured)
        if keep:
            view.keeping(stack.redis_url, stack.gateway_url, stack.flower_url)
            try:
                stack.keep_up(lambda text: screen.note(text, "yellow"))
            except KeyboardInterrupt:
                stack.drain()
    if not keep:
        view.leaving(stack.gateway_url, stack.flower_url)
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
    urls = {"gateway": stack.gateway_url, "Flower": stack.flower_url}
    for name, url in urls.items():
        if url is None:
            view.without(name)
            continue
        with view.step(name) as done:
            stack.wait_for_servers(READY_TIMEOUT_S)
            done(url)


def _run(view: DemoScreen, stack: Stack) -> tuple[list[Measured], Figures]:
    import asyncio

    from llorch_worker.bench.jobs.client_load import follow_jobs

    requests = _jobs()
    with view.jobs(requests[0], len(requests)) as (on_event, on_end):
        return asyncio.run(
            follow_jobs(stack.redis_url, "demo", requests, on_event=on_event, on_end=on_end)
        )


def _jobs() -> list[GenerationRequest]:
    """32 requests, the same every time: the streamed one, one of each special kind, plain ones."""
    streamed = GenerationRequest(
        prompt="Once upon a time", max_tokens=220, temperature=0.7, seed=11, priority="high"
    )
    chat = {"role": "user", "content": "Tell me a story about a dragon."}
    special = [
        # Up to the first full stop.
        GenerationRequest(prompt="The robot", max_tokens=96, temperature=0, stop="."),
        GenerationRequest(prompt="Lily", max_tokens=96, seed=2, stop=("\n", " and ")),
        GenerationRequest(prompt="Every night", max_tokens=96, seed=3, stop="."),
        # Several texts from one prompt.
        GenerationRequest(prompt="The king", max_tokens=40, seed=4, n=4),
        GenerationRequest(prompt="A little", max_tokens=40, seed=5, n=2, temperature=0.8),
        # A chat, through the model's template.
        GenerationRequest(messages=[chat], max_tokens=64, seed=6),
        GenerationRequest(messages=[chat], max_tokens=64, temperature=0),
        # Log probabilities, penalties, narrow sampling, a deadline, other priorities.
        GenerationRequest(prompt="Long ago", max_tokens=32, seed=8, logprobs=3),
        GenerationRequest(prompt="One day", max_tokens=64, seed=9, repetition_penalty=1.2),
        GenerationRequest(prompt="There was", max_tokens=64, seed=10, top_p=0.9, top_k=40),
        GenerationRequest(prompt="It was a", max_tokens=64, seed=11, deadline_s=50),
        GenerationRequest(prompt="Lily", max_tokens=24, seed=12, priority="low"),
    ]
    plain = [
        GenerationRequest(
            prompt=_OPENINGS[index % len(_OPENINGS)],
            max_tokens=_LENGTHS_TOKENS[index % len(_LENGTHS_TOKENS)],
            temperature=_TEMPERATURES[index // 2 % len(_TEMPERATURES)],
            seed=100 + index,
        )
        for index in range(JOBS - len(special) - 1)
    ]
    return [streamed, *special, *plain]


def _document(stack: Stack, found: Figures, measured: list[Measured]) -> dict[str, Any]:
    return {
        **asdict(found),
        "jobs_per_s": found.jobs_per_s,
        "tokens_per_s": found.tokens_per_s,
        "gateway": stack.gateway_url,
        "flower": stack.flower_url,
        "errors": [
            job.end.document().model_dump(mode="json")
            for job in measured
            if isinstance(job.end, LlorchError)
        ],
        "texts": [job.end.text for job in measured if isinstance(job.end, GenerationResult)],
    }
