"""Why a delivered message is no task message, as sentences.

Celery checks little of what it uses, and some of it only after the job has run, as whether it can
send the next tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from celery.canvas import Signature
from celery.utils.time import maybe_iso8601
from kombu.compression import get_encoder
from kombu.serialization import registry

from llorch_worker.contract import describe, shown

MAX_ID_CHARS = 255
_MOST_S = 1e9

NEXT_TASKS = ("callbacks", "errbacks", "chain", "chord")
"""What Celery puts beside a task's arguments. Celery's tracer would take any other name for an
attribute of the request, such as another job's id."""


def fault_of(message: Any) -> str | None:
    """The reason why this is not a task message, ``None`` if it is one. Those of protocol 1 have
    become messages of protocol 2: see ``broker/messages/message.py``."""
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


def usable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What Celery can use of a message's headers or options; all, unless it was refused."""

    def is_usable(name: str, value: Any) -> bool:
        if name in NEXT_TASKS:
            return _can_send(name, value)
        return name not in _HEADERS or _HEADERS[name][0](value)

    return {name: value for name, value in fields.items() if is_usable(name, value)}


def _fault_of_options(options: Mapping[str, Any]) -> str | None:
    for name in NEXT_TASKS:
        value = options.get(name)
        if not _can_send(name, value):
            tasks_of = "is not a task" if name == "chord" else "is not a list of tasks"
            return f"its {name} option {tasks_of} as Celery writes it (got {describe(value)})"
    return None


def _can_send(name: str, value: object) -> bool:
    try:
        return not value or (is_signature(value) if name == "chord" else are_signatures(value))
    except RecursionError:
        return False


def _are_stamps(value: object) -> bool:
    return isinstance(value, Mapping) and not any(
        isinstance(each, list | Mapping)
        for stamp in value.values()
        for each in (stamp if isinstance(stamp, list) else [stamp])
    )


def _are_time_limits(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def is_signature(value: object) -> bool:
    """Whether ``value`` is a task as Celery writes it, with all tasks inside."""
    if not isinstance(value, Mapping) or not isinstance(value.get("task"), str):
        return False
    kwargs, options = value.get("kwargs"), value.get("options")
    kind = value.get("subtask_type") or ""
    return (
        isinstance(value.get("args"), list | tuple)
        and isinstance(kwargs, Mapping)
        and isinstance(options, Mapping)
        and all(options.get(name) is None or is_right(options[name])
                for name, is_right in _OPTIONS.items())
        and are_texts(options.get("stamped_headers", ()))
        and shown(kind) in ("", *Signature.TYPES)
        and all(is_right(kwargs.get(name)) for name, is_right in _PARTS.get(kind, {}).items())
    )  # fmt: skip


def are_signatures(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_signature, value))


def is_text(value: object) -> bool:
    return isinstance(value, str)


def are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_text, value))


def is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def is_time(value: object) -> bool:
    try:
        return isinstance(maybe_iso8601(value), datetime)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return False


def _is_number_of_seconds(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST_S


def _is_count(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 2**31


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _one_or_more(value: object) -> bool:
    return is_signature(value) or are_signatures(value)


def _is_compression(value: object) -> bool:
    try:
        return bool(get_encoder(value))
    except (LookupError, TypeError):
        return False


def _is_nothing(_value: object) -> bool:
    return False


_Check = Callable[[Any], bool]
_HEADERS: Mapping[str, tuple[_Check, str]] = {
    "expires": (is_time, "a time as Celery writes it"),
    "timelimit": (_are_time_limits, "a pair of seconds"),
    "group": (is_text, "a string"),
    "stamped_headers": (are_texts, "a list of strings"),
    # Celery puts them into sets, for each revoke by stamps, of whichever job.
    "stamps": (_are_stamps, "an object of texts, numbers or lists of them"),
}
"""Headers that Celery uses without a check, by name: the check, and what it asks for. None is as if
the header were not there."""
_OPTIONS: Mapping[str, _Check] = {
    **dict.fromkeys(
        ("task_id", "group_id", "root_id", "parent_id", "reply_to", "shadow", "queue", "exchange",
         "routing_key", "argsrepr", "kwargsrepr"),
        is_text,
    ),
    **dict.fromkeys(("time_limit", "soft_time_limit", "countdown"), _is_number_of_seconds),
    **dict.fromkeys(("priority", "group_index"), _is_count),
    "delivery_mode": lambda value: value in ("transient", "persistent") or _is_count(value),
    **dict.fromkeys(("headers", "stamps", "retry_policy"), is_object),
    **dict.fromkeys(("link", "link_error"), _one_or_more),
    **dict.fromkeys(("producer", "connection", "publisher", "router"), _is_nothing),
    "eta": is_time,
    "expires": lambda value: is_time(value) or _is_number_of_seconds(value),
    "serializer": lambda value: is_text(value) and value in registry.name_to_type,
    "compression": _is_compression,
    "chain": are_signatures,
    "chord": is_signature,
}  # fmt: skip
"""What Celery uses of a task's options without a check; null is as good as none."""
_PARTS: Mapping[str, Mapping[str, _Check]] = {
    "chain": {"tasks": are_signatures},
    "group": {"tasks": _one_or_more},
    "chord": {"header": _one_or_more, "body": is_signature},
    "xmap": {"task": is_signature, "it": _is_list},
    "xstarmap": {"task": is_signature, "it": _is_list},
    "chunks": {"task": is_signature, "it": _is_list, "n": _is_count},
}
"""What a task of each kind holds."""
