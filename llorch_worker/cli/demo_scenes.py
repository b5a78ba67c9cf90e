"""What ``llorch demo`` shows of a chat model: an answer, JSON by a schema, the death of an engine
and of a worker."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from llorch_worker.broker.fleet import registry
from llorch_worker.client import Client, Job
from llorch_worker.contract import GenerationRequest, GenerationResult, Started, Tokens
from llorch_worker.demo_model import DEMO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llorch_worker.cli.demo_screen import DemoScreen
    from llorch_worker.stack.stack import Stack

SILENCE_S = 60.0
"""How long a job may send no event."""
KILLED_AFTER_TOKENS = 60
QUESTION = "What is the capital of France, and what is it known for?"
CHARACTER = "Invent a dragon for a children's book."
STORY = "Write a story about a robot who learns to paint."
DRAGON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "colour": {"enum": ["red", "green", "blue", "gold"]},
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 999},
        "likes": {
            "type": "array",
            "items": {"type": "string", "maxLength": 32},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["name", "colour", "age_in_years", "likes"],
    "additionalProperties": False,
}


def show_scenes(view: DemoScreen, stack: Stack, workers: Mapping[str, str]) -> dict[str, Any]:
    """Run and show all scenes; returns their part of the document.

    ``workers`` are the node names of the workers, and their names in the stack. An engine and a
    worker are killed if another one is there to go on.
    """
    with Client(stack.redis_url, model=DEMO) as client:
        found: dict[str, Any] = {"chat": _answer(view, client), "json": _json(view, client)}
        if len(workers) > 1:
            view.scene("An engine dies", "its worker hands the job on", STORY)
            found["engine_takeover"] = _takeover(
                view, client, workers, "the engine of ", lambda name: _kill_engine(client, name)
            )
            view.scene("A worker dies", "another goes on at the next token", STORY)
            found["takeover"] = _takeover(
                view, client, workers, "", lambda name: stack.kill(workers[name])
            )
        return found


def _answer(view: DemoScreen, client: Client) -> str:
    view.scene("A chat", "the answer as it is generated", QUESTION)
    return _shown(view, client.submit(_chat(QUESTION, max_tokens=120), stream=True))


def _json(view: DemoScreen, client: Client) -> str:
    view.scene("JSON", "every token obeys a schema", CHARACTER)
    schema = {"name": "dragon", "schema": DRAGON}
    form = {"type": "json_schema", "json_schema": schema}
    request = _chat(CHARACTER, max_tokens=160, response_format=form)
    return _shown(view, client.submit(request, stream=True))


def _shown(view: DemoScreen, job: Job) -> str:
    for entry in job.stream(timeout=SILENCE_S):
        if isinstance(entry.event, Tokens):
            view.write(entry.event.text)
    return _ended(view, job).text


def _kill_engine(client: Client, hostname: str) -> None:
    (pid,) = (
        card.engine_pid for card in registry.workers(client.redis) if card.hostname == hostname
    )
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def _takeover(
    view: DemoScreen,
    client: Client,
    workers: Mapping[str, str],
    what: str,
    kill: Callable[[str], None],
) -> dict[str, Any]:
    """Kill ``what`` of a job's worker with SIGKILL and follow the stream, which another continues.

    ``kill`` gets the worker's node name.
    """
    job = client.submit(_chat(STORY, max_tokens=240, repetition_penalty=1.1), stream=True)
    killed, taken_over_by, pause_s = "", "", 0.0
    tokens, heard_s = 0, time.monotonic()
    for entry in job.stream(timeout=SILENCE_S):
        event = entry.event
        if isinstance(event, Started):
            worker = event.worker
            if killed:
                taken_over_by, pause_s = worker, time.monotonic() - heard_s
                view.mark(f"{workers.get(worker, worker)} goes on, {pause_s:.1f} s later", "green")
        if not isinstance(event, Tokens):
            continue
        view.write(event.text)
        tokens, heard_s = event.index + len(event.ids), time.monotonic()
        if not killed and tokens >= KILLED_AFTER_TOKENS:
            killed = worker
            kill(worker)
            view.mark(
                f"{what}{workers[worker]} is killed with SIGKILL after {tokens} tokens", "red"
            )
    result = _ended(view, job)
    return {
        "killed": killed,
        "taken_over_by": taken_over_by,
        "pause_s": pause_s,
        "attempts": result.attempts,
        "text": result.text,
    }


def _chat(text: str, **options: Any) -> GenerationRequest:
    message = {"role": "user", "content": text}
    return GenerationRequest(messages=[message], temperature=0, **options)


def _ended(view: DemoScreen, job: Job) -> GenerationResult:
    result = job.result(SILENCE_S)
    tokens, timings = result.usage.completion, result.timings
    total_ms = timings.prefill_ms + timings.decode_ms
    view.outcome(
        f"{tokens} tokens, {tokens / total_ms * 1e3:,.0f} a second; "
        f"the first after {timings.first_token_ms:.0f} ms"
        if result.attempts == 1
        else f"{tokens} tokens; every one was sent once"
    )
    return result
