"""The servers that `up` and `demo` start beside the workers: their ports, and how to call one."""

from __future__ import annotations

import os

from llorch_worker.cli.terminal import extras
from llorch_worker.stack import ports
from llorch_worker.stack.programs import FLOWER, GATEWAY

_DEFAULT_PORTS = {FLOWER: ports.DEFAULT_FLOWER_PORT, GATEWAY: ports.DEFAULT_GATEWAY_PORT}


def server_port(name: str, asked: int | None) -> int | None:
    """The port for Flower or the gateway; None if its extra is not installed.

    Raises:
        CommandError: the port that was ``asked`` for is taken.
        MissingExtra: a port was asked for, but the extra is not installed.
    """
    if extras.missing_modules(name):
        if asked is not None:
            extras.require(name)
        return None
    return ports.choose(asked, _DEFAULT_PORTS[name], f"--{name}-port")


def curl_command(url: str, model: str, *, chats: bool) -> str:
    """A line for a shell that asks the gateway at ``url`` for text; ``chats``: of a chat model."""
    # The environment of this command is the gateway's.
    keyed = bool(os.environ.get("LLORCH_GATEWAY_KEYS"))
    key = '-H "Authorization: Bearer $LLORCH_KEY" ' if keyed else ""
    path, prompt = "completions", '"prompt": "Once upon a time"'
    if chats:
        path = "chat/completions"
        prompt = '"messages": [{"role": "user", "content": "Tell me a story."}]'
    return (
        f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' "
        f'-d \'{{"model": "{model}", "max_tokens": 64, "temperature": 0.7, {prompt}}}\''
    )
