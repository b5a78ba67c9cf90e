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

Each worker also has queues of its own, for jobs that are meant for it and no other:
``llorch.<model>@gpu0.host`` and, before all others, ``llorch.<model>@gpu0.host:high``, with the
same priority lists. They come before the shared ones of the same priority. Neither can the ``@`` be
part of a model name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llorch_worker.contract import Priority

QUEUE_PREFIX = "llorch."
HIGH_SUFFIX = ":high"
SUSPECTS_SUFFIX = ":suspects"
WORKER_MARK = "@"
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


def worker_queue(model: str, worker: str) -> str:
    """The queue of one worker alone: ``gpu0@host`` serving ``toy`` has ``llorch.toy@gpu0.host``."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", worker.replace("@", ".", 1))
    return f"{normal_queue(model)}{WORKER_MARK}{name}"


def queues(model: str, worker: str | None = None) -> tuple[str, ...]:
    """The queues that a worker of ``model`` consumes, in pop order; its own among them where its
    node name is given."""
    shared = (high_queue(model), normal_queue(model))
    if worker is None:
        return shared
    own = own_queues(worker_queue(model, worker))
    return own[0], shared[0], own[1], shared[1]


def own_queues(own: str) -> tuple[str, str]:
    """Both queues of a worker, in pop order, by the name of the normal one."""
    return f"{own}{HIGH_SUFFIX}", own


def route(model: str, priority: Priority, worker: str | None = None) -> Route:
    """Where a job of this priority waits: for any worker of ``model``, or for one alone."""
    normal = normal_queue(model) if worker is None else worker_queue(model, worker)
    match priority:
        case "high":
            return Route(f"{normal}{HIGH_SUFFIX}", None)
        case "normal":
            return Route(normal, None)
        case "low":
            return Route(normal, LOW_STEP)


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


def normal_queue_of(queue_or_list: str) -> str:
    """The queue of normal priority beside this queue, or list of a queue."""
    return queue_of(queue_or_list).partition(":")[0]


def model_of(queue_or_list: str) -> str:
    """The model that jobs in this queue, or list of a queue, are for."""
    return normal_queue_of(queue_or_list).partition(WORKER_MARK)[0].removeprefix(QUEUE_PREFIX)


def list_of(to: Route) -> str:
    """The Redis list that a message with this route is pushed to."""
    return f"{to.queue}{STEP_SEPARATOR}{to.priority}" if to.priority else to.queue


def queue_of(list_key: str) -> str:
    """The queue that a list belongs to."""
    return list_key.partition(STEP_SEPARATOR)[0]
