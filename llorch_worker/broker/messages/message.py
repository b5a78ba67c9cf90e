"""A job as a Celery task message, in the form that kombu pushes to a Redis list."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from celery.utils import uuid
from kombu.utils.json import dumps

from llorch_worker.broker.messages.body import (
    Unreadable,
    parse,
    read_body,
    read_typed,
    text_of,
    too_large,
)
from llorch_worker.broker.queues import Route
from llorch_worker.contract import JobRequest
from llorch_worker.contract.plain_objects import mark_plain
from llorch_worker.contract.values import UnreadableJson

TENANT = "llorch_tenant"
"""The header that names the job's tenant, among the first that our client writes."""
ENQUEUED_AT = "llorch_enqueued_at"
"""Message header: unix time in s at which the job was enqueued."""
OWNER = "llorch_owner"
"""Message header: the owner in the job's record, for a record that has to be made again."""

MOST_HEADER_BYTES = 2**20
MOST_ID_BYTES = 65_536
"""As in ``lua/parts/message.lua``."""

_TIME = f"@time{uuid()}@"
"""A placeholder; random, so that no field of a request can contain it."""
_BODY = b'"body": "'
_EARLIEST_S, _LATEST_S = 1e9, 1e11
"""The year 2001, and 5138: a time in milliseconds is above."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError, Unreadable)


def write_message(
    app: Celery,
    request: JobRequest,
    *,
    model: str,
    job_id: str,
    to: Route,
    headers: Mapping[str, str],
) -> tuple[str, str]:
    """A job as ``app`` would send it with these ``headers`` beside its own, split in two where the
    enqueue time goes.

    ``lua/enqueue.lua`` inserts the time by Redis' clock.
    """
    task = app.amqp.as_task_v2(
        job_id,
        request.task,
        (),
        mark_plain(request.wire()) | {"model": model},
        # Celery would put the prompt into the headers, for logs and monitors. The worker itself
        # writes what those show of a job.
        argsrepr="()",
        kwargsrepr="{...}",
    )
    first = {} if request.tenant is None else {TENANT: request.tenant}
    args, kwargs, embedded = task.body
    body = args, kwargs, _without_defaults(embedded)
    message: dict[str, Any] = {
        "headers": {ENQUEUED_AT: _TIME, **first, "id": job_id, **headers}
        | _without_defaults(task.headers),
        "body": base64.b64encode(encode_json(body)).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "properties": {
            **task.properties,
            "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": to.queue},
            "delivery_mode": 2,
            "delivery_tag": job_id,
            "priority": to.priority or 0,
        },
    }
    before, after = dumps(message).split(f'"{_TIME}"')
    return before, after


def _without_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What Celery's workers do not read in a field that is missing: the others are a third of what
    a short job takes in Redis."""
    defaults: tuple[Any, ...] = (None, 0, {}, [None, None])
    return {name: value for name, value in fields.items() if value not in defaults}


def encode_json(value: Any) -> bytes:
    """``value`` in kombu's JSON, as UTF-8. Only lone surrogates are escaped.

    Escapes for all other characters would take up to three times the memory in Redis.
    """
    return bytes(dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def read_envelope(raw: bytes, most_bytes: int) -> dict[str, Any]:
    """kombu's envelope of a message, with what its body holds in ``payload``, and its size in
    ``size``; or, in ``unreadable``, why that cannot be read.

    Raises:
        Unreadable: it is no message of at most ``most_bytes``.
    """
    if len(raw) > most_raw_bytes(most_bytes):
        raise too_large(f"it has {len(raw)} bytes", most_bytes)
    try:
        envelope, body = _without_body(raw)
        # Delivery and acknowledgement read these fields; here a missing one does no harm.
        properties, headers = envelope["properties"], envelope.get("headers") or {}
        info = properties["delivery_info"]
        names = (properties["delivery_tag"], info["exchange"], info["routing_key"])
    except UnreadableJson as error:
        raise Unreadable(f"it {error}") from None
    except _UNREADABLE:
        raise Unreadable("it is not a task message") from None
    parts = (envelope, properties, info, headers)
    if not all(isinstance(each, dict) for each in parts) or not all(
        isinstance(name, str) for name in names
    ):
        raise Unreadable("it is not a task message")
    read: dict[str, Any] = {"size": len(raw)}
    try:
        payload, read["size"] = read_body(
            body,
            encoding=properties.get("body_encoding"),
            compression=headers.get("compression"),
            content_type=envelope.get("content-type"),
            most_bytes=most_bytes,
        )
    except Unreadable as error:
        read["unreadable"] = str(error)
    else:
        if "task" not in headers:
            headers, payload = _as_protocol_2(headers, payload)
        read["payload"] = payload
    # Only what kombu has in an envelope: any producer may have written a "payload" beside it.
    return {
        "headers": {name: value for name, value in headers.items() if name != "compression"},
        "body": "",
        "properties": {**properties, "body_encoding": None},
        **{name: envelope.get(name) for name in ("content-type", "content-encoding")},
        **read,
    }


def head_of(raw: bytes) -> bytes | None:
    """A message without what is in its body; None if that is not as kombu writes it."""
    start, end = _body_in(raw)
    return raw[:start] + raw[end:] if start else None


def most_raw_bytes(most_bytes: int) -> int:
    """How many a message has whose body has ``most_bytes``: base64 takes a third more."""
    return most_bytes * 4 // 3 + MOST_HEADER_BYTES


def _without_body(raw: bytes) -> tuple[Any, Any]:
    """The envelope, and its body, which may be long: as kombu writes it, it need not be parsed."""
    start, end = _body_in(raw)
    if start:
        rest = raw[:start] + _TIME.encode() + raw[end:]
        envelope: Any = parse(rest, read_typed)
        if envelope["body"] == _TIME:
            return envelope, raw[start:end]
    envelope = parse(raw, read_typed)
    return envelope, envelope.get("body")


def _body_in(raw: bytes) -> tuple[int, int]:
    """Where the body begins and ends; 0 if it cannot be told without parsing it."""
    start = raw.find(_BODY) + len(_BODY)
    end = raw.find(b'"', start)
    return (start, end) if len(_BODY) <= start <= end and b"\\" not in raw[start:end] else (0, 0)


def reread(raw: bytes, most_bytes: int) -> str | None:
    """The message as ``lua/parts/message.lua`` reads it: in ASCII, with the job's id and ETA in its
    headers; None if it names no job, is larger than one whose body has ``most_bytes``, or is like
    that. In Celery's first protocol, the body names them."""
    if len(raw) > most_raw_bytes(most_bytes):
        return None
    try:
        envelope = parse(raw)
        properties, headers = envelope.get("properties") or {}, envelope.get("headers") or {}
        job = headers
        if job.get("id") is None and job.get("task") is None:
            job = _task_of(envelope, most_bytes)
        job_id: Any = job.get("id")
        if job_id is None:
            job_id = properties.get("correlation_id")
        if not 0 < len(job_id.encode()) <= MOST_ID_BYTES:
            return None
        named = envelope | {"headers": headers | {"id": job_id, "eta": job.get("eta")}}
        # cjson reads no half of a surrogate pair, which Python's JSON may hold.
        text = json.dumps(named, ensure_ascii=False).encode(errors="replace")
        message = json.dumps(json.loads(text))
    except _UNREADABLE:
        return None
    return None if message.encode() == raw else message


def _task_of(envelope: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    """The body as Celery's first protocol has it; empty if it is another."""
    try:
        task = _body_of(envelope, most_bytes)
    except _UNREADABLE:
        return {}
    return task if isinstance(task, dict) else {}


def unix_ms(eta: str) -> int | None:
    """The Unix time of an ETA in ISO 8601, UTC if it has no zone; None if it is none."""
    try:
        due = datetime.fromisoformat(eta)
        due = due if due.tzinfo else due.replace(tzinfo=UTC)
        return math.floor(due.timestamp() * 1e3)
    except (ValueError, OverflowError):
        return None


def read_task(
    raw: str | bytes, most_bytes: int, read: Callable[[str], Any] = json.loads
) -> tuple[dict[str, Any], Any] | None:
    """The headers and the body of a task message, prompt included; None if it cannot be read, or
    its body has more than ``most_bytes``. The body is ``[args, kwargs, options]``. ``read``: see
    :func:`.parse`."""
    try:
        envelope = parse(raw.encode() if isinstance(raw, str) else raw, read)
        return _as_protocol_2(envelope.get("headers") or {}, _body_of(envelope, most_bytes, read))
    except _UNREADABLE:
        return None


def _body_of(
    envelope: Mapping[str, Any], most_bytes: int, read: Callable[[str], Any] = json.loads
) -> Any:
    """Raises what :data:`_UNREADABLE` names."""
    headers, properties = (envelope.get(name) or {} for name in ("headers", "properties"))
    text = text_of(
        envelope["body"],
        encoding=properties.get("body_encoding"),
        compression=headers.get("compression"),
        most_bytes=most_bytes,
    )
    return parse(text, read)


def _as_protocol_2(headers: Mapping[str, Any], task: Any) -> tuple[dict[str, Any], Any]:
    """Headers and body in Celery's second message protocol. In the first, the body says all."""
    if not isinstance(task, dict) or "task" not in task:
        return dict(headers), task
    job = dict(task)
    embed = {name: job.pop(name, None) for name in ("callbacks", "errbacks", "chord")}
    args, kwargs = job.pop("args", None), job.pop("kwargs", None)
    body = [[] if args is None else args, {} if kwargs is None else kwargs, embed]
    return {**headers, "group": job.pop("taskset", None), **job}, body


def enqueue_time_s(header: object) -> float | None:
    """The header :data:`ENQUEUED_AT`, if it is a Unix time in seconds. Any producer may have
    written it, also one whose clock has never been set."""
    if isinstance(header, int | float) and _EARLIEST_S < header < _LATEST_S:
        return float(header)
    return None


def trace_id(traceparent: object) -> str | None:
    """The trace id in a header of this name, 32 hexadecimal digits; None if it is not one, as W3C's
    Trace Context writes it. Any producer may have written it."""
    found = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    return None if found is None else found[1]
