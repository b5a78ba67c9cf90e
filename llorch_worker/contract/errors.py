"""The errors that cross the queue: one class a code, each with a message, a retry hint and faults.

An error travels as ``args`` through Celery's JSON result backend, so a producer without this
package still reads ``[message, code, retriable, faults]`` from ``AsyncResult(...).result.args``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Fault(BaseModel):
    """One rule that one field of a request broke.

    ``got`` names the value's type and size, and the value itself only where it is a number:
    prompts must not travel in errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str
    rule: str
    got: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule} (got {self.got})"


class ErrorDocument(BaseModel):
    """An error as JSON: in ``failed`` events, in HTTP answers, in ``--json`` output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    message: str
    retriable: bool
    faults: tuple[Fault, ...] = ()


class LlorchError(Exception):
    """Base of every error with a stable code."""

    code: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        code: str | None = None,
        retriable: bool | None = None,
        faults: Iterable[Fault | Mapping[str, Any]] = (),
    ) -> None:
        """``code`` and ``retriable`` default to the class's own.

        They are parameters because Celery rebuilds an error from a result by calling its class
        with ``args``.
        """
        self.message = message
        self.faults = tuple(Fault.model_validate(fault) for fault in faults)
        super().__init__(
            message,
            self.code if code is None else code,
            self.retriable if retriable is None else retriable,
            [fault.model_dump() for fault in self.faults],
        )

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def document(self) -> ErrorDocument:
        return ErrorDocument(
            code=self.code, message=self.message, retriable=self.retriable, faults=self.faults
        )


class InvalidRequest(LlorchError):
    """A request that can never succeed as it stands."""

    code = "INVALID_REQUEST"

    @classmethod
    def from_faults(cls, faults: Iterable[Fault]) -> InvalidRequest:
        faults = tuple(faults)
        return cls("; ".join(str(fault) for fault in faults), faults=faults)


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens together do not fit into the model's context."""

    code = "CONTEXT_LENGTH_EXCEEDED"


class ModelNotServed(LlorchError):
    """Nobody serves the model that the request names."""

    code = "MODEL_NOT_SERVED"
    retriable = True


class QueueFull(LlorchError):
    """The queue of this model is at its limit."""

    code = "QUEUE_FULL"
    retriable = True


class DeadlineExceeded(LlorchError):
    """The deadline passed before the first token."""

    code = "DEADLINE_EXCEEDED"
    retriable = True


class Cancelled(LlorchError):
    """The job was cancelled or revoked."""

    code = "CANCELLED"


class OutOfMemory(LlorchError):
    """The device had no memory left for this job."""

    code = "OUT_OF_MEMORY"
    retriable = True


class AttemptsExhausted(LlorchError):
    """The job was tried as often as allowed and its worker died each time."""

    code = "ATTEMPTS_EXHAUSTED"


class ModelLoadFailed(LlorchError):
    """A model file is missing, damaged, or no Llama."""

    code = "MODEL_LOAD_FAILED"


class InvalidLoadOption(ModelLoadFailed):
    """An option is out of range for this model, such as a context longer than its own."""


class InternalError(LlorchError):
    """A defect of ours."""

    code = "INTERNAL"
    retriable = True


ERROR_CLASSES: dict[str, type[LlorchError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        ModelNotServed,
        QueueFull,
        DeadlineExceeded,
        Cancelled,
        OutOfMemory,
        AttemptsExhausted,
        ModelLoadFailed,
        InternalError,
    )
}


def error_from_document(document: ErrorDocument) -> LlorchError:
    """The error that ``document`` describes, as its own class."""
    cls = ERROR_CLASSES.get(document.code, InternalError)
    return cls(document.message, faults=document.faults)


class BrokerUnavailable(Exception):
    """Redis does not answer, or refuses; the message names the URL (no password) and the remedy."""


class BrokerRefused(BrokerUnavailable):
    """The URL is at fault: it is none, or Redis does not want its user, password or database."""
