from __future__ import annotations

import redis
from celery import Celery

from llorch_worker.broker.queues import Route, queues, route
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.contract import TASK_NAME
from tests.broker.steps import load, take
from tests.services import RedisServer


def test_each_priority_has_its_list_and_normal_is_the_stock_one() -> None:
    assert route("m", "high") == Route("llorch.m:high", None)
    assert route("m", "normal") == Route("llorch.m", None)
    assert route("m", "low") == Route("llorch.m", 9)


def test_a_worker_takes_from_the_high_queue_first() -> None:
    assert queues("m") == ("llorch.m:high", "llorch.m")


def test_no_models_queue_is_another_models_high_queue() -> None:
    names = ["m", "m.high", "m-high", "high"]
    assert len({queue for name in names for queue in queues(name)}) == 8


def test_all_priorities_of_a_producer_with_ten_steps_are_normal_but_the_last(
    redis_server: RedisServer, store: redis.Redis
) -> None:
    with Celery("stock", broker=redis_server.url, set_as_current=False) as stock:
        stock.conf.broker_transport_options = {"priority_steps": list(range(10))}
        fields = {"prompt": "x"}
        sent = [
            stock.send_task(TASK_NAME, kwargs=fields, queue="llorch.toy", priority=priority)
            for priority in reversed(range(10))
        ]
    assert load(store).waiting == 10
    # From the most urgent step on, behind the one without a priority.
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert load(store).waiting == 10
    assert [claim.job_id for claim in take(store)] == [result.id for result in reversed(sent)]
    assert sent[0].id in (store.lindex("llorch.toy\x06\x169", 0) or sent[0].id)
