"""Which Redis list a job waits in.

kombu keeps one list a priority step, pops step 0 first and cannot tell a message of priority 0
from one without a priority: both lie in the list that carries the queue's plain name. "Without"
must mean normal, so normal *is* step 0, and what goes before it needs a list of its own:

    =================================  ====================================================
    ``llorch.<model>:high``            "high"; a queue of its own, popped before all others
    ``llorch.<model>``                 "normal"; every message without a priority, or with 0
    ``llorch.<model>\\x06\\x163``, ``6``  what a stock producer sends with ``priority=3`` or ``6``
    ``llorch.<model>\\x06\\x169``        "low", and a stock producer's ``priority=9``
    =================================  ====================================================

A worker consumes both queues with kombu's ``priority`` order, which makes one blocking pop over
all these lists in the order above. A stock producer reaches the high list by naming its queue.
The colon cannot be part of a model name, so no model's queue is another's high queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from llorch_worker.contract import Priority

QUEUE_PREFIX = "llorch."
HIGH_SUFFIX = ":high"
LOW_STEP = 9


@dataclass(frozen=True)
class Route:
    """Where a message goes: the queue's name and kombu's priority number."""

    queue: str
    priority: int | None


def normal_queue(model: str) -> str:
    return f"{QUEUE_PREFIX}{model}"


def high_queue(model: str) -> str:
    return f"{QUEUE_PREFIX}{model}{HIGH_SUFFIX}"


def queues(model: str) -> tuple[str, str]:
    """The queues a worker of ``model`` consumes, in pop order."""
    return high_queue(model), normal_queue(model)


def route(model: str, priority: Priority) -> Route:
    """Where a job of this priority waits."""
    match priority:
        case "high":
            return Route(high_queue(model), None)
        case "normal":
            return Route(normal_queue(model), None)
        case "low":
            return Route(normal_queue(model), LOW_STEP)
