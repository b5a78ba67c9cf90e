"""Celery's remote control, from a stock app."""

from __future__ import annotations

from typing import Any, NoReturn

from celery import Celery

from tests.services import WorkerProcess, wait_until

PING_S = 0.2
REPLY_S = 60
MOST_REPLIES = 1000
"""One counts, but those to earlier commands may come late."""


class Replied(Exception):
    """Ends the wait for more replies."""


def told(stock: Celery, worker: WorkerProcess, command: str, **arguments: Any) -> Any:
    """The reply of ``worker`` to a control command. It is sent once the worker listens: one that
    has just started or reconnected may not do so yet."""
    wait_until(lambda: ask(stock, worker, "ping", PING_S), what=f"{worker.hostname} to listen")
    reply = ask(stock, worker, command, REPLY_S, **arguments)
    assert reply is not None, f"no reply to {command}"
    return reply[worker.hostname]


def ask(
    stock: Celery, worker: WorkerProcess, command: str, timeout_s: float, **arguments: Any
) -> dict[str, Any] | None:
    """Sends a control command; None if no reply comes in time."""

    def leave(reply: dict[str, Any]) -> NoReturn:
        raise Replied(reply)

    # The pooled connections may be older than the last restart of Redis.
    with stock.connection_for_write() as connection:
        try:
            stock.control.broadcast(
                command, arguments=arguments, destination=[worker.hostname], reply=True,
                timeout=timeout_s, limit=MOST_REPLIES, callback=leave, connection=connection,
            )  # fmt: skip
        except Replied as replied:
            return dict(replied.args[0])
    return None


def consumed(stock: Celery, worker: WorkerProcess) -> list[str]:
    """The queues that ``worker`` takes jobs from."""
    return [queue["name"] for queue in told(stock, worker, "active_queues")]
