"""The producer: sends the jobs as a stock Celery user does, and some as a user of our client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from celery import Celery, chain, chord, signature
from celery.backends.redis import RedisBackend

from benches.battle import other_app
from benches.battle.background import Background
from benches.battle.fleet import MODEL, QUEUE
from benches.battle.ledger import STOCK, Ledger
from benches.battle.meddler import Meddler
from benches.battle.schedule import Order
from benches.battle.watch import StreamReader
from llorch_worker.broker.waiting.waiting import waiting
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME

TICK_S = 0.02
LONGEST_BACKLOG_JOBS = 40


class DeafBackend(RedisBackend):  # type: ignore[misc]
    """Subscribes to no result, because nobody here waits for one."""

    def on_task_call(self, *_: Any) -> None: ...

    def add_pending_result(self, result: Any, **_: Any) -> Any:
        return result


class Producer(Background):
    """Notes jobs in the ledger and sends them with a stock app, without this package, or with our
    client."""

    def __init__(
        self,
        url: str,
        parcels: Iterator[tuple[Order, ...]],
        *,
        client: Any,
        ledger: Ledger,
        reader: StreamReader,
        meddler: Meddler | None,
    ) -> None:
        super().__init__("load")
        self._parcels = parcels
        backend = f"{__name__}:{DeafBackend.__name__}+{url}"
        self.app = Celery("battle", broker=url, backend=backend, set_as_current=False)
        self._ours = Client(url, model=MODEL)
        self._client = client
        self._ledger = ledger
        self._reader = reader
        self._meddler = meddler

    def _backlog(self) -> int:
        return sum(each.jobs for each in waiting(self._client, MODEL).queues.values())

    def _run(self) -> None:
        for parcel in self._parcels:
            while self._backlog() > LONGEST_BACKLOG_JOBS and not self._stopping.wait(TICK_S):
                pass
            if self._stopping.wait(parcel[0].gap_s):
                return
            self._send(*parcel)

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self.app.close()
            self._ours.close()

    def _send(self, *orders: Order) -> None:
        """Sends one job, or several with the one that follows them, the last."""
        now_s = time.monotonic()
        for order in orders:
            due_s = now_s + order.countdown_s if order.countdown_s else 0.0
            self._ledger.jobs.append(replace(order.job, sent_s=now_s, due_s=due_s))
            if order.job.kind != STOCK:
                self._reader.follow(order.job.id, listens=order.watched)
        if orders[0].ours is not None:
            self._ours.submit(job_id=orders[0].job.id, **orders[0].kwargs)
            return
        *before, end = map(self._signature, orders)
        if len(before) > 1:
            chord(before, app=self.app)(end)
        elif before:
            chain(*before, end, app=self.app).apply_async()
        else:
            end.apply_async()
        for order in orders:
            if order.cancel is not None and self._meddler is not None:
                self._meddler.cancel(order.job.id, order.cancel)

    def _signature(self, order: Order) -> Any:
        options: dict[str, Any] = {"task_id": order.job.id}
        if order.job.kind == STOCK:
            return signature(other_app.TASK, queue=other_app.QUEUE, app=self.app, **options)
        if order.countdown_s:
            options["countdown"] = order.countdown_s
        # Immutable, because a job of ours has no use for another one's result.
        return signature(
            TASK_NAME, kwargs=order.kwargs, queue=QUEUE, immutable=True, app=self.app, **options
        )
