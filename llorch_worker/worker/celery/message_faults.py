"""Why a delivered message is no task message, as sentences.

Celery checks little of what it uses, and some of it only after the job has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llorch_worker.contract import describe
from llorch_worker.worker.celery.signatures import (
    are_texts,
    is_object,
    is_signature,
    is_text,
    is_time,
)

MAX_ID_CHARS = 255

NEXT_TASKS = ("callbacks", "errbacks", "chain", "chord")
"""What Celery puts beside a task's arguments. Celery's tracer would take any other name for an
attribute of the request, such as another job's id."""


def fault_of(message: Any) -> str | None:
    """The reason why this is not a task message, ``None`` if it is one. Those of protocol 1 have
    become messages of protocol 2: see ``broker/message.py``."""
    headers = message.headers
    if message.unreadable is not None:
        return str(message.unreadable)
    if "task" not in headers:
        return "it is not a task message"
    if not isinstance(headers["task"], str):
        return "its task header is not a string"
    if headers.get("eta") is not None:
        # Those that a claim could read are no longer in the headers.
        return "its eta is not a time as Celery writes it"
    if id_of(message) is None:
        return f"its id is not a string of 1 to {MAX_ID_CHARS} characters"
    for name, (is_right, what) in _HEADERS.items():
        value = headers.get(name)
        if value is not None and not is_right(value):
            return f"its header {name} is not {what} (got {describe(value)})"
    match message.payload:
        case [list(), dict(), dict() | None as options]:
            # Celery's tracer takes those of the headers, too.
            return _fault_of_options(headers) or _fault_of_options(options or {})
    return "its body is not [args, kwargs, options]"


def id_of(message: Any) -> str | None:
    """The id of the job that the message names, if it is one."""
    job_id = message.headers.get("id")
    return job_id if isinstance(job_id, str) and 0 < len(job_id) <= MAX_ID_CHARS else None


def _fault_of_options(options: Mapping[str, Any]) -> str | None:
    for name in NEXT_TASKS:
        value = options.get(name)
        tasks = [value] if name == "chord" and value else value or []
        if not isinstance(tasks, list | tuple) or not all(map(is_signature, tasks)):
            tasks_of = "is not a task" if name == "chord" else "is not a list of tasks"
            return f"its {name} option {tasks_of} as Celery writes it (got {describe(value)})"
    return None


def _are_time_limits(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


_HEADERS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "expires": (is_time, "a time as Celery writes it"),
    "timelimit": (_are_time_limits, "a pair of seconds"),
    "group": (is_text, "a string"),
    "stamped_headers": (are_texts, "a list of strings"),
    "stamps": (is_object, "an object"),
}
"""Headers that Celery uses without a check, by name: the check, and what it asks for. None is as if
the header were not there."""
