"""The events of a job's stream: ``started``, ``tokens``*, then one terminal event; ``restarted``
before ``started`` if the job begins again. A job of texts has ``vectors``* in place of tokens."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from llorch_worker.contract.errors import ErrorDocument
from llorch_worker.contract.output_format import as_tuple
from llorch_worker.contract.result import Choice, FinishReason, Timings, TokenLogprobs, Usage
from llorch_worker.contract.tools import CallPart


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Started(_Event):
    """A worker took the job."""

    type: Literal["started"] = "started"
    worker: str
    model: str
    model_fingerprint: str = ""
    """Of weights, tokenizer and chat template; empty if the worker does not say."""
    arithmetic: str = ""
    """Dtypes and kernels: workers that differ in these alone may continue each other's jobs."""
    attempt: int = 1
    prompt_tokens: int
    cached_tokens: int = 0
    queue_ms: float


class Restarted(_Event):
    """The job begins again, as its model was replaced, or its server cannot go on: the text before
    this event is void."""

    type: Literal["restarted"] = "restarted"
    worker: str
    attempt: int


class Tokens(_Event):
    """New tokens of one choice; ``index`` is the position of the first of ``ids`` in it.

    ``text`` lags behind ``ids`` while a character is incomplete or a stop string may have begun.
    """

    type: Literal["tokens"] = "tokens"
    choice: int = 0
    index: int
    ids: tuple[int, ...]
    text: str
    reasoning_content: str | None = None
    """What of the thought before the text is new."""
    tool_calls: Annotated[tuple[CallPart, ...] | None, BeforeValidator(as_tuple)] = None
    """What of the calls after the text is new."""
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def has_any(self) -> bool:
        """Whether anything is new. A server may tell thoughts and calls without ids."""
        return bool(self.ids or self.text or self.reasoning_content or self.tool_calls)

    @classmethod
    def of(cls, choice: Choice) -> Tokens:
        """All of ``choice`` at once."""
        calls = tuple(
            CallPart(
                index=index,
                id=call.id,
                name=call.function.name,
                arguments=call.function.arguments,
            )
            for index, call in enumerate(choice.tool_calls or ())
        )
        return cls(
            choice=choice.index,
            index=0,
            ids=choice.token_ids,
            text=choice.text,
            reasoning_content=choice.reasoning_content,
            tool_calls=calls or None,
            logprobs=choice.logprobs,
        )


class Vectors(_Event):
    """What some of a job's texts gave, in order: the vectors of a list, or the scores of pairs. The
    last of a job are in its result alone."""

    type: Literal["vectors"] = "vectors"
    index: int
    """The place of the first."""
    total: int
    """The texts or pairs of the job."""
    width: int
    """Numbers of each."""
    values: str
    """base64 of float32 ``[count, width]``, little-endian."""

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.data) // (4 * self.width)

    @property
    def data(self) -> bytes:
        return b64decode(self.values)

    def rest(self, known: int) -> Vectors:
        """These without the first ``known``."""
        left = b64encode(self.data[4 * self.width * known :]).decode()
        return self.model_copy(update={"index": self.index + known, "values": left})


class Finished(_Event):
    """The job succeeded. ``finish_reason`` is that of the first choice."""

    type: Literal["finished"] = "finished"
    finish_reason: FinishReason
    usage: Usage
    timings: Timings


class Failed(_Event):
    """The job failed."""

    type: Literal["failed"] = "failed"
    error: ErrorDocument


class CancelledEvent(_Event):
    """The job was cancelled or revoked."""

    type: Literal["cancelled"] = "cancelled"


Event = Annotated[
    Started | Restarted | Tokens | Vectors | Finished | Failed | CancelledEvent,
    Field(discriminator="type"),
]

TERMINAL_EVENTS = (Finished, Failed, CancelledEvent)

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def encode_event(event: Event) -> str:
    """``event`` as one JSON document, the value of field ``event`` of a stream entry."""
    return event.model_dump_json(exclude_none=True)


def decode_event(document: str | bytes) -> Event:
    """Parses ``document``; raises ``pydantic.ValidationError`` if it is not an event."""
    return _ADAPTER.validate_json(document)
