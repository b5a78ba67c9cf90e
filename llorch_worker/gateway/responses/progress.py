"""What has come of a response. Its job alone says so, and any gateway can read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

from llorch_worker.client import AsyncJob, JobState, StreamEntry
from llorch_worker.contract import LlorchError, ModelChanged, Restarted, Started, Tokens
from llorch_worker.gateway.bodies import Bodies, about_bytes
from llorch_worker.gateway.errors import as_shown
from llorch_worker.gateway.job_events import CHANGED, PATIENCE_S
from llorch_worker.gateway.responses.store import NotKept, ResponseStore
from llorch_worker.openai_api.errors import body_of
from llorch_worker.openai_api.responses import End, Response, ResponseRecord, response_of
from llorch_worker.openai_api.responses_events import Event, ResponseEvents

_UNDER_WAY = ("queued", "in_progress")


async def end_of(job: AsyncJob, timeout_s: float | None = None) -> End:
    """Waits for the job's end. Raises TimeoutError if it has not come within ``timeout_s``."""
    try:
        return await job.result(timeout_s, patience_s=PATIENCE_S)
    except LlorchError as error:
        return error


async def end_if_ended(job: AsyncJob) -> End | JobState:
    """The end of the job, or its state if it goes on. Raises ``NotKept``."""
    status = await job.status()
    if status.state == "unknown":
        raise NotKept
    return await end_of(job) if status.ended else status.state


async def response_now(record: ResponseRecord, job: AsyncJob, bodies: Bodies) -> Response:
    """Raises ``NotKept`` if what came of it is no longer there."""
    end = await end_if_ended(job)
    if isinstance(end, str):
        return response_of(record, None, running=end != "queued")
    return await bodies.run(about_bytes(end), lambda: response_of(record, end))


async def response_events(
    record: ResponseRecord,
    job: AsyncJob,
    entries: AsyncIterator[StreamEntry],
    bodies: Bodies,
    read: Sequence[StreamEntry] = (),
    *,
    after: int = -1,
) -> AsyncIterator[Event]:
    """The response's events. ``entries``: all of the job's, after those that were ``read``.
    ``after``: the number of the last event that the reader has had, here left out like all before
    it."""
    events = ResponseEvents(record)
    # A stream that begins again no longer has the text that this reader may have had.
    has_text = after > events.last_before_text
    new: Iterable[Event]
    for event in events.begin():
        if event["sequence_number"] > after:
            yield event
    try:
        async for entry in _chained(read, entries):
            match entry.event:
                case Started():
                    new = events.start()
                case Restarted():
                    if has_text:
                        raise ModelChanged(CHANGED)
                    continue
                case Tokens():
                    has_text = True
                    # A generator: it works where it is listed, beside the loop.
                    made = events.tokens(entry.event)
                    new = await bodies.run(about_bytes(entry.event), partial(list, made))
                case _:
                    end = await end_of(job)
                    new = await bodies.run(about_bytes(end), partial(list, events.end(end)))
            for event in new:
                if event["sequence_number"] > after:
                    yield event
    except Exception as error:  # noqa: BLE001 - a stream that has begun has no other way to say
        detail = body_of(as_shown(error)).error
        yield events.error(detail.code, detail.message, after)


async def _chained(
    read: Sequence[StreamEntry], entries: AsyncIterator[StreamEntry]
) -> AsyncIterator[StreamEntry]:
    for entry in read:
        yield entry
    async for entry in entries:
        yield entry


async def response_event(store: ResponseStore, job: AsyncJob) -> tuple[str, Response] | None:
    """The event that a webhook sends of a response in the background; None until it has ended.

    Raises:
        LookupError: it is not known, or not any more.
    """
    record = await store.find(job.id)
    if record is None:
        raise LookupError(job.id)
    try:
        response = await response_now(record, job, store.bodies)
    except NotKept:
        raise LookupError(job.id) from None
    if response.status in _UNDER_WAY:
        # It is kept until its end has been sent.
        await store.keep(record)
        return None
    return f"response.{response.status}", response
