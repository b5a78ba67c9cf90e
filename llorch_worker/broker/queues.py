"""The queues of a model, and the lists in which stock producers put jobs: the model's inbox.

kombu keeps one list for each priority step, pops step 0 first, and cannot tell priority 0 from no
priority: both use the list with the queue's plain name. A message without a priority must be
normal, so normal is step 0, and a higher priority needs a queue of its own:

    ===========================  ====================================================
    ``llorch.<model>:high``      "high"; a queue of its own
    ``llorch.<model>``           "normal"; every message without a priority, or with 0
    ``llorch.<model>\\x06\\x169``  "low", and a stock producer's ``priority=9``
    ===========================  ====================================================

What a stock producer sends with ``priority=1`` to 8 comes to a list for that step, and so does all
with a priority if it uses kombu's option ``sep=":"``. From all of them jobs are moved to the set
from which workers claim: see ``lua/parts/inbox.lua`` and ``lua/parts/score.lua``. There a job still
has one of the three names above, which says its model and its priority.

Model names contain neither ``:`` nor ``@``, so no two of these names are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llorch_worker.contract import Priority

QUEUE_PREFIX = "llorch."
HIGH_SUFFIX = ":high"
TEXTS_SUFFIX = ":texts"
"""Behind the name of a queue: its jobs that read texts. No queue has such a name."""
WORKER_MARK = "@"
LOW_STEP = 9
PRIORITY_STEPS = range(10)
"""kombu pushes a message to the list of the highest step not above its priority. Its default steps
are 0, 3, 6 and 9, and a producer may choose any others up to 9."""
STEP_SEPARATOR = "\x06\x16"
LOW_SUFFIX = f"{STEP_SEPARATOR}{LOW_STEP}"
_LOW_LIST = re.compile(f"({STEP_SEPARATOR}|:){LOW_STEP}$")


@dataclass(frozen=True)
class Route:
    """A message's destination: the queue's name and kombu's priority number."""

    queue: str
    priority: int | None

    @property
    def list_key(self) -> str:
        """The Redis list that a message with this route is pushed to."""
        return f"{self.queue}{STEP_SEPARATOR}{self.priority}" if self.priority else self.queue


def route(model: str, priority: Priority) -> Route:
    """The route of a job with this priority to the workers of ``model``."""
    normal = normal_queue(model)
    match priority:
        case "high":
            return Route(f"{normal}{HIGH_SUFFIX}", None)
        case "normal":
            return Route(normal, None)
        case "low":
            return Route(normal, LOW_STEP)


def normal_queue(model: str) -> str:
    return f"{QUEUE_PREFIX}{model}"


def place_of(model: str, worker: str) -> str:
    """A worker's name in the registry: ``llorch.toy@gpu0.host`` for ``gpu0@host``."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", worker.replace("@", ".", 1))
    return f"{normal_queue(model)}{WORKER_MARK}{name}"


def queues(model: str) -> tuple[str, ...]:
    """The queues that a worker of ``model`` consumes, the most urgent first."""
    normal = normal_queue(model)
    return f"{normal}{HIGH_SUFFIX}", normal


def is_high(queue_or_list: str) -> bool:
    """Whether a job that waits there is of high priority."""
    return HIGH_SUFFIX in queue_or_list


def priority_of(list_key: str) -> Priority:
    """The priority of the jobs in a list."""
    if is_high(list_key):
        return "high"
    return "low" if _LOW_LIST.search(list_key) else "normal"


def inbox(consumed: Iterable[str]) -> list[str]:
    """The lists to which kombu pushes for these queues, those first that producers use most."""
    in_order = sorted(consumed, key=is_high)
    steps = [LOW_STEP, *PRIORITY_STEPS[1:LOW_STEP]]
    return [
        *in_order,
        *(f"{queue}{STEP_SEPARATOR}{step}" for queue in in_order for step in steps),
        *(f"{queue}:{step}" for queue in in_order for step in steps),
    ]


def inbox_of(model: str) -> list[str]:
    """The inbox of a model."""
    return inbox(queues(model))


def is_job_queue(queue: str) -> bool:
    return queue.startswith(QUEUE_PREFIX)


def queue_of(list_key: str) -> str:
    """The queue that a list belongs to."""
    return list_key.partition(STEP_SEPARATOR)[0]


def normal_queue_of(queue_or_list: str) -> str:
    """The normal-priority counterpart of a queue or list."""
    return queue_of(queue_or_list).partition(":")[0]


def model_of(queue_or_list: str) -> str:
    """The model of the jobs in a queue or list."""
    return normal_queue_of(queue_or_list).partition(WORKER_MARK)[0].removeprefix(QUEUE_PREFIX)
