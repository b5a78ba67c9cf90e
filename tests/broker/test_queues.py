from __future__ import annotations

from llorch_worker.broker.queues import Route, queues, route


def test_each_priority_has_its_list_and_normal_is_the_stock_one() -> None:
    assert route("m", "high") == Route("llorch.m:high", None)
    assert route("m", "normal") == Route("llorch.m", None)
    assert route("m", "low") == Route("llorch.m", 9)


def test_a_worker_takes_from_the_high_queue_first() -> None:
    assert queues("m") == ("llorch.m:high", "llorch.m")


def test_no_models_queue_is_another_models_high_queue() -> None:
    names = ["m", "m.high", "m-high", "high"]
    assert len({queue for name in names for queue in queues(name)}) == 8
