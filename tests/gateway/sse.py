"""Reads server-sent events as a browser does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from llorch_worker.contract import Event, Tokens, decode_event


@dataclass(frozen=True)
class ServerSentEvent:
    id: str
    type: str
    event: Event


def events(lines: Iterable[str]) -> Iterator[ServerSentEvent]:
    """The events of a body; comments are skipped."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield ServerSentEvent(fields["id"], fields["event"], decode_event(fields["data"]))
            fields = {}


def read(
    url: str, job_id: str, last_event_id: str | None = None, **more: Any
) -> list[ServerSentEvent]:
    """The events of a job to their end."""
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    path = f"{url}/v1/jobs/{job_id}/events"
    with httpx.stream("GET", path, headers=headers, timeout=60, **more) as response:
        assert response.status_code == 200, response.read()
        return list(events(response.iter_lines()))


def token_ids(found: Iterable[ServerSentEvent]) -> list[int]:
    return [i for each in found if isinstance(each.event, Tokens) for i in each.event.ids]


def text(found: Iterable[ServerSentEvent]) -> str:
    return "".join(each.event.text for each in found if isinstance(each.event, Tokens))
