"""Which Redis list a job waits in.

kombu keeps one list for each priority step, pops step 0 first, and cannot tell priority 0 from no
priority: both use the list with the queue's plain name. A message without a priority must be
normal, so normal is step 0, and a higher priority needs a queue of its own:

    ===========================  ====================================================
    ``llorch.<model>:high``      "high"; a queue of its own, popped before all others
    ``llorch.<model>``           "normal"; every message without a priority, or with 0
    ``llorch.<model>\\x06\\x169``  "low", and a stock producer's ``priority=9``
    ===========================  ====================================================

A worker claims from these lists in the order above. A stock producer reaches the high list by
naming its queue. What it sends with ``priority=1`` to 8 goes to a list for that step, and so does
all with a priority if it uses kombu's option ``sep=":"``; whoever watches the queues moves these
jobs to the list of their priority, see :func:`moved_lists`.

Each worker also has two worker queues, for jobs meant for it alone: ``llorch.<model>@gpu0.host``
and ``llorch.<model>@gpu0.host:high``, with the same priority lists. They come before the shared
ones of the same priority.

Model names contain neither ``:`` nor ``@``, so no two of these names are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llorch_worker.contract import Priority

QUEUE_PREFIX = "llorch."
HIGH_SUFFIX = ":high"
SUSPECTS_SUFFIX = ":suspects"
SCHEDULED_SUFFIX = ":scheduled"
WORKER_MARK = "@"
LOW_STEP = 9
PRIORITY_STEPS = range(10)
"""kombu pushes a message to the list of the highest step not above its priority. Its default steps
are 0, 3, 6 and 9, and a producer may choose any others up to 9."""
STEP_SEPARATOR = "\x06\x16"
TENANTS_MARK = "t"
"""Ends the name of the list with the next job of each tenant: see ``lua/parts/tenants.lua``."""
LOW_SUFFIX = f"{STEP_SEPARATOR}{LOW_STEP}"
_LOW_LIST = re.compile(f"({STEP_SEPARATOR}|:){LOW_STEP}{TENANTS_MARK}?$")


@dataclass(frozen=True)
class Route:
    """A message's destination: the queue's name and kombu's priority number."""

    queue: str
    priority: int | None

    @property
    def list_key(self) -> str:
        """The Redis list that a message with this route is pushed to."""
        return f"{self.queue}{STEP_SEPARATOR}{self.priority}" if self.priority else self.queue


def route(model: str, priority: Priority, worker: str | None = None) -> Route:
    """The route of a job with this priority: to any worker of ``model``, or only to ``worker``."""
    normal = normal_queue(model) if worker is None else worker_queue(model, worker)
    match priority:
        case "high":
            return Route(f"{normal}{HIGH_SUFFIX}", None)
        case "normal":
            return Route(normal, None)
        case "low":
            return Route(normal, LOW_STEP)


def normal_queue(model: str) -> str:
    return f"{QUEUE_PREFIX}{model}"


def worker_queue(model: str, worker: str) -> str:
    """The normal-priority worker queue: ``llorch.toy@gpu0.host`` for ``gpu0@host``."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", worker.replace("@", ".", 1))
    return f"{normal_queue(model)}{WORKER_MARK}{name}"


def suspects(model: str) -> str:
    """The list of jobs that may have killed their last engine; see ``lua/claim.lua``."""
    return f"{normal_queue(model)}{SUSPECTS_SUFFIX}"


def scheduled(model: str) -> str:
    """The sorted set of jobs that wait for their ETA: job id -> Unix time in ms."""
    return f"{normal_queue(model)}{SCHEDULED_SUFFIX}"


def queues(model: str, worker: str | None = None) -> tuple[str, ...]:
    """The queues that a worker of ``model`` consumes, in pop order.

    ``worker`` is its node name; with it, its worker queues are among them.
    """
    shared = normal_queue(model)
    normal = [shared] if worker is None else [worker_queue(model, worker), shared]
    return *(f"{queue}{HIGH_SUFFIX}" for queue in normal), *normal


def ordered(consumed: Iterable[str]) -> list[str]:
    """The ``consumed`` queues of one worker, the most urgent first."""
    return sorted(consumed, key=lambda name: (HIGH_SUFFIX not in name, WORKER_MARK not in name))


def is_high(queue_or_list: str) -> bool:
    """Whether a job that waits there is of high priority."""
    return HIGH_SUFFIX in queue_or_list


def priority_of(list_key: str) -> Priority:
    """The priority of the jobs in a list."""
    if is_high(list_key):
        return "high"
    return "low" if _LOW_LIST.search(list_key) else "normal"


def claimed_lists(consumed: Iterable[str]) -> list[str]:
    """The plain lists from which a worker claims that consumes these queues of one model, the most
    urgent first. Beside each is that of its tenants."""
    in_order = ordered(consumed)
    return [*in_order, *(f"{queue}{LOW_SUFFIX}" for queue in in_order if not is_high(queue))]


def moved_lists(queue: str) -> list[str]:
    """The lists to which stock producers push, and which whoever watches the queue empties into
    :func:`claimed_lists`: see ``lua/ring.lua``."""
    steps = PRIORITY_STEPS[1:]
    kept = [] if is_high(queue) else [LOW_STEP]
    return [
        *(f"{queue}{STEP_SEPARATOR}{step}" for step in steps if step not in kept),
        *(f"{queue}:{step}" for step in steps),
    ]


def lists(consumed: Iterable[str]) -> list[str]:
    """Every Redis list in which jobs of these queues may wait."""
    found: list[str] = []
    for queue in ordered(consumed):
        for plain in claimed_lists([queue]):
            found += [plain, tenants_list(plain)]
        found += moved_lists(queue)
    return found


def tenants_list(list_key: str) -> str:
    """Where the tenants of a list's priority take turns."""
    mark = TENANTS_MARK if STEP_SEPARATOR in list_key else f"{STEP_SEPARATOR}{TENANTS_MARK}"
    return f"{list_key}{mark}"


def shared_lists(model: str) -> list[str]:
    """Every list in which jobs for any worker of ``model`` wait, the suspects' last."""
    return [*lists(queues(model)), suspects(model)]


def watched(model: str) -> list[str]:
    """What whoever watches ``model`` looks at: see :mod:`.watch`."""
    return [*shared_lists(model), scheduled(model)]


def worker_lists(queue: str) -> list[str]:
    """Every list of the worker whose normal queue this is."""
    return lists([f"{queue}{HIGH_SUFFIX}", queue])


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
