"""Commands whose standard streams are closed or cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cli.command import COMMAND_TIMEOUT_S, environment
from tests.services import RedisServer, free_port
from tests.waiting import wait_until


def shell(redirection: str, *arguments: str) -> list[str]:
    """The command, with a redirection as a shell has it."""
    command = [sys.executable, "-P", "-m", "llorch_worker.cli", *arguments]
    return ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_result_that_cannot_be_printed_is_one_error(
    redis_server: RedisServer, options: tuple[str, ...]
) -> None:
    ran = subprocess.run(
        shell(">&-", "top", "--redis", redis_server.url, *options),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (
        1, "error: stdout is closed, so the result cannot be printed\n",
    )  # fmt: skip


@pytest.mark.parametrize("redirection", [">&- 2>&- <&-", "2>/dev/full", "2>&9"])
def test_a_gateway_runs_although_its_banner_cannot_be_printed(
    redis_server: RedisServer, redirection: str
) -> None:
    port = free_port()
    command = shell(redirection, "gateway", "--redis", redis_server.url, "--port", str(port))
    unread, pipe = os.pipe()
    os.close(unread)
    as_9: Callable[[], Any] = lambda: os.dup2(pipe, 9)  # noqa: E731
    with subprocess.Popen(
        command, env=environment(), preexec_fn=as_9, pass_fds=(9,), stdout=subprocess.DEVNULL
    ) as gateway:
        os.close(pipe)

        def answers() -> bool:
            assert gateway.poll() is None
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(answers, timeout_s=COMMAND_TIMEOUT_S, what="the gateway to listen")
        finally:
            gateway.terminate()
