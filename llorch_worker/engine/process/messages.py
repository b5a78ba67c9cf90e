"""What crosses between a keeper and its engine's process: documents and arrays.

Requests, events and results are JSON within a message, in the forms that cross the queue, except
new tokens: they may cross at each step, which has no time for names of fields.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from pydantic import TypeAdapter

from llorch_worker.contract import (
    REQUESTS,
    RESULTS,
    Event,
    GenerationRequest,
    JobRequest,
    JobResult,
    Journal,
    LlorchError,
    Timings,
    Usage,
    decode_event,
    encode_event,
)
from llorch_worker.contract.errors import ERROR_CLASSES, as_told
from llorch_worker.engine.interface import EngineStats, ModelFacts
from llorch_worker.engine.told import TokensTold
from llorch_worker.intake.constraints.grammar import asked_for
from llorch_worker.intake.prepared import PreparedRequest
from llorch_worker.intake.texts import PreparedTexts
from llorch_worker.processes.child import EndLabel

_JOURNAL = TypeAdapter(Journal)
QUICK_BYTES: Final = 2**16
"""A longer document takes ms to read, in which the engine would hear of no cancel."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class ErrorMessage(msgspec.Struct, array_like=True):
    """An error of the contract, by its class; see :func:`.as_told`."""

    name: str
    message: str
    code: str
    retriable: bool
    faults: list[dict[str, str]]
    spent: bytes | None = None
    """Of a cancelled job: usage and timings as JSON."""
    place: str | None = None
    """Of a defect: where it was raised, of files, lines and names alone."""

    @classmethod
    def of(cls, error: BaseException) -> ErrorMessage:
        told = as_told(error, "worker")
        message, code, retriable, faults = told.args
        spent = getattr(told, "spent", None)
        notes = getattr(told, "__notes__", ())
        return cls(
            type(told).__name__,
            message,
            code,
            retriable,
            faults,
            spent and json.dumps([part.model_dump() for part in spent]).encode(),
            "\n".join(notes) or None,
        )

    def error(self) -> LlorchError:
        named = {each.__name__: each for each in _classes(LlorchError)}
        kind = named.get(self.name) or ERROR_CLASSES.get(self.code, LlorchError)
        error = kind(self.message, self.code, self.retriable, self.faults)
        if self.spent is not None:
            usage, timings = json.loads(self.spent)
            error.spent = Usage(**usage), Timings(**timings)  # type: ignore[attr-defined]
        if self.place is not None:
            error.add_note(self.place)
        return error


def _classes(kind: type[LlorchError]) -> list[type[LlorchError]]:
    """``kind`` and its subclasses that are made as it is."""
    found = [kind] if kind.__init__ is LlorchError.__init__ else []
    return [*found, *(each for sub in kind.__subclasses__() for each in _classes(sub))]


# To the engine -------------------------------------------------------------------------------


class Load(_Message):
    """The first message: what to load."""

    path: str
    options: dict[str, Any]
    model_name: str
    engine_class: str
    """``module:Class``."""
    log_level: int
    others: dict[str, Any]
    """Other arguments of the class's ``load``."""
    told_every_s: float = 0.0
    """For how long new tokens may wait, so that one message has those of several steps."""
    around_follows: bool = False
    """Whether :class:`Around` is the next message; else the engine renders the chat template."""


class Around(_Message):
    """See :class:`.AroundTurns`."""

    before: str
    after: str


class Submit(_Message):
    handle: int
    """What this connection calls the generation."""
    task: str
    request: bytes
    is_prepared: bool
    """Whether that is the document of a :class:`.PreparedRequest` or :class:`.PreparedTexts`."""
    journal: bytes | None
    is_quick: bool
    """Whether it takes no time to take in: there is no long text to read, no grammar to compile,
    and nothing to check."""
    has_grammar: bool
    job_id: str
    worker: str = "local"
    attempt: int = 1
    queued_at: float | None = None
    retried_at: float | None = None
    suspect: bool = False

    @classmethod
    def of(
        cls,
        handle: int,
        request: JobRequest,
        prepared: bytes | None,
        journal: Journal | None,
        /,
        **attempt: Any,
    ) -> Submit:
        """``prepared``: what an intake has made of ``request``. ``attempt``: what else crosses of
        an :class:`.Attempt`."""
        # The keeper holds the metadata, which change nothing.
        document = prepared or json.dumps(request.wire() | {"metadata": None}).encode()
        read = None if journal is None else _JOURNAL.dump_json(journal)
        is_prepared = prepared is not None
        has_grammar = isinstance(request, GenerationRequest) and asked_for(request) is not None
        is_short = len(document) <= QUICK_BYTES and not journal
        return cls(
            handle,
            task=request.task,
            request=document,
            is_prepared=is_prepared,
            journal=read,
            is_quick=is_prepared and is_short and not has_grammar,
            has_grammar=has_grammar,
            **attempt,
        )

    def arguments(self) -> dict[str, Any]:
        """Those of ``Engine.submit``."""
        names = ("job_id", "worker", "attempt", "queued_at", "retried_at", "suspect")
        journal = None if self.journal is None else _JOURNAL.validate_json(self.journal)
        document = json.loads(self.request)
        prepared = PreparedRequest if self.task == GenerationRequest.task else PreparedTexts
        return {
            "request": (
                prepared.from_document(document)
                if self.is_prepared
                else REQUESTS[self.task](**document)
            ),
            "journal": journal,
            **{name: getattr(self, name) for name in names},
        }


class Cancel(_Message):
    handle: int


class Call(_Message):
    """A question, by the name of a method of the engine."""

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class Pace(_Message):
    """For how long new tokens may wait from now on."""

    told_every_s: float


class Close(_Message):
    pass


ToEngine = Load | Around | Submit | Cancel | Call | Pace | Close


# To the keeper -------------------------------------------------------------------------------


class Progress(_Message):
    done_bytes: int
    total_bytes: int


class Loaded(_Message):
    facts: ModelFacts
    stats: EngineStats


class NotLoaded(_Message):
    error: ErrorMessage


class Refused(_Message):
    handle: int
    error: ErrorMessage


class EventTold(msgspec.Struct, array_like=True, tag="e"):
    """Any other event."""

    handle: int
    document: str

    @classmethod
    def of(cls, handle: int, event: Event) -> EventTold:
        return cls(handle, encode_event(event))

    def event(self) -> Event:
        return decode_event(self.document)


class Step(_Message):
    """All that the generations told in a step, or in several."""

    told: list[TokensTold | EventTold]
    taken: list[int] = []
    """The requests that were taken in before."""


class Result(_Message):
    """The end of a generation, beside its last event."""

    handle: int
    document: bytes


class Failure(_Message):
    """The other end of a generation."""

    handle: int
    error: ErrorMessage


class Answer(_Message):
    """Of a :class:`Call`."""

    number: int
    value: Any = None
    error: ErrorMessage | None = None


class LogLine(_Message):
    logger: str
    level: int
    text: str
    place: str | None
    """Where an error was raised."""


class LastWords(_Message):
    """The engine ends by itself."""

    label: EndLabel
    reason: str


ToKeeper = (
    Progress | Loaded | NotLoaded | Refused | Step | Result | Failure | Answer | LogLine | LastWords
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_keeper = msgspec.msgpack.Decoder(ToKeeper).decode


def result_document(result: JobResult) -> bytes:
    """``result`` without the metadata, which the keeper has."""
    return result.model_dump_json(exclude={"metadata", "text"}, exclude_none=True).encode()


def result_of(document: bytes, request: JobRequest) -> JobResult:
    """The result of ``request``."""
    result = RESULTS[request.task].model_validate_json(document)
    return result.model_copy(update={"metadata": request.metadata})
