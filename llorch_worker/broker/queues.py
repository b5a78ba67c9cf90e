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

A worker claims from all these lists in the order above. A stock producer reaches the high list by
naming its queue. The colon cannot be part of a model name, so no model's queue is another's high
queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llorch_worker.contract import Priority

QUEUE_PREFIX = "llorch."
HIGH_SUFFIX = ":high"
SUSPECTS_SUFFIX = ":suspects"
LOW_STEP = 9
PRIORITY_STEPS = (0, 3, 6, 9)
"""kombu's own; a stock producer's message goes into the list of the step below its priority."""
STEP_SEPARATOR = "\x06\x16"


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


def is_job_queue(queue: str) -> bool:
    return queue.startswith(QUEUE_PREFIX)


def lists(consumed: Iterable[str]) -> list[str]:
    """The Redis lists of the ``consumed`` queues, the most urgent first."""
    consumed = tuple(consumed)
    return [
        f"{queue}{STEP_SEPARATOR}{step}" if step else queue
        for step in PRIORITY_STEPS
        for queue in consumed
    ]


def suspects(model: str) -> str:
    """Jobs that may have killed their last worker; see ``lua/claim.lua``. Claimed before all."""
    return f"{QUEUE_PREFIX}{model}{SUSPECTS_SUFFIX}"


def model_of(queue_or_list: str) -> str:
    """The model that jobs in this queue, or list of a queue, are for."""
    queue = queue_or_list.partition(STEP_SEPARATOR)[0].partition(":")[0]
    return queue.removeprefix(QUEUE_PREFIX)


def list_of(to: Route) -> str:
    """The Redis list that a message with this route is pushed to."""
    return f"{to.queue}{STEP_SEPARATOR}{to.priority}" if to.priority else to.queue


def queue_of(list_key: str) -> str:
    """The queue that a list belongs to."""
    return list_key.partition(STEP_SEPARATOR)[0]
