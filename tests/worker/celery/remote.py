"""Celery's remote control, from a stock app."""

from __future__ import annotations

from typing import Any

from celery import Celery

from tests.services import WorkerProcess, wait_until

REPLY_S = 2


def told(stock: Celery, worker: WorkerProcess, command: str, **arguments: Any) -> Any:
    """The reply of ``worker`` to a control command, which is repeated until there is one: a worker
    that has just reconnected may not listen yet."""

    def ask() -> list[dict[str, Any]]:
        # The pooled connections may be older than the last restart of Redis.
        with stock.connection_for_write() as connection:
            replies: list[dict[str, Any]] = stock.control.broadcast(
                command,
                arguments=arguments,
                destination=[worker.hostname],
                reply=True,
                timeout=REPLY_S,
                connection=connection,
            )
        return replies

    (reply,) = wait_until(ask, what=f"the reply to {command}")
    return reply[worker.hostname]


def consumed(stock: Celery, worker: WorkerProcess) -> list[str]:
    """The queues that ``worker`` takes jobs from."""
    return [queue["name"] for queue in told(stock, worker, "active_queues")]
