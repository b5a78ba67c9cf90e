"""Errors that cross the queue: one class per code, with a message, a retry hint and faults.

An error travels as ``args`` through Celery's JSON result backend, so a producer without this
package reads ``[message, code, retriable, faults]`` from ``AsyncResult(...).result.args``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from traceback import format_tb
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from llorch_worker.contract.shown import shown
from llorch_worker.misspelt import did_you_mean, meant

if TYPE_CHECKING:
    from llorch_worker.contract.result import Timings, Usage

MOST_FAULTS = 50


class Fault(BaseModel):
    """One rule that one field of a request broke.

    ``got`` is the value's type and size, and the value itself only if it is a number: prompts must
    not travel in errors.
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
    retriable: bool = False
    """Whether the same request may succeed later: of the class, or of this error."""

    def __init__(
        self,
        message: str,
        code: str | None = None,
        retriable: bool | None = None,
        faults: Iterable[Fault | Mapping[str, Any]] = (),
    ) -> None:
        """``code`` and ``retriable`` default to the class's own.

        They are parameters because Celery rebuilds an error by calling its class with ``args``.
        """
        self.message = message
        if retriable is not None:
            self.retriable = retriable
        self.faults = tuple(Fault.model_validate(fault) for fault in faults)
        super().__init__(
            message,
            self.code if code is None else code,
            self.retriable,
            [fault.model_dump() for fault in self.faults],
        )

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __repr__(self) -> str:
        # What Celery logs and monitors show; ``args`` would repeat the message's faults.
        return f"{type(self).__name__}({self.message!r})"

    def document(self) -> ErrorDocument:
        return ErrorDocument(
            code=self.code, message=self.message, retriable=self.retriable, faults=self.faults
        )


class InvalidRequest(LlorchError):
    """The request breaks a rule and will never succeed."""

    code = "INVALID_REQUEST"

    @classmethod
    def from_fault(cls, field: str, rule: str, got: str) -> InvalidRequest:
        """One field breaks one rule: see :class:`Fault`."""
        return cls.from_faults([Fault(field=field, rule=rule, got=got)])

    @classmethod
    def from_faults(cls, faults: Iterable[Fault]) -> InvalidRequest:
        """The first :data:`MOST_FAULTS` are reported, and no more are made; a list of a million
        wrong token ids has as many."""
        faults = tuple(islice(faults, MOST_FAULTS + 1))
        reported = faults[:MOST_FAULTS]
        more = "; and more" if len(faults) > len(reported) else ""
        return cls("; ".join(map(str, reported)) + more, faults=reported)


class IdempotencyKeyReused(InvalidRequest):
    """The first request with this idempotency key was another one."""

    @classmethod
    def by(cls, job_id: str) -> IdempotencyKeyReused:
        """``job_id``: the first request's."""
        rule = f"was sent with another request, job {job_id}; a new request needs a new key"
        fault = Fault(field="idempotency_key", rule=rule, got="the same key again")
        return cls(str(fault), faults=[fault])


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the requested tokens do not fit into the model's context."""

    code = "CONTEXT_LENGTH_EXCEEDED"

    @classmethod
    def of(
        cls, limit: int, prompt_tokens: int, max_tokens: int, *, at_least: bool, fault: Fault
    ) -> ContextLengthExceeded:
        """``max_tokens``: what was asked for beside the prompt, 1 if less would do. ``at_least``:
        the prompt may have more tokens.

        OpenAI's and Anthropic's clients know the error by these words.
        """
        prompt = f"{'at least ' if at_least else ''}{prompt_tokens} tokens"
        why = f"the prompt is too long: {prompt} > {limit} maximum"
        if max_tokens > 1:
            why = f"the prompt has {prompt} and max_tokens asks for {max_tokens} more"
        message = f"This model's maximum context length is {limit} tokens. However, {why}."
        return cls(message, faults=[fault])


class ModelNotServed(LlorchError):
    """No worker serves the model that the request names."""

    code = "MODEL_NOT_SERVED"
    retriable = True

    @classmethod
    def never(cls, model: str, known: Iterable[str]) -> ModelNotServed:
        """No worker ever served it here, but others: its name is wrong, which no waiting mends.

        Before the first worker has come, every name may be right.
        """
        names = sorted(known)
        what = f"{shown(model)!r} (known models: {', '.join(names) or 'none'})"
        sentence = f"no worker here has ever served {what}"
        return cls(did_you_mean(meant(model, names), sentence), retriable=not names)


class QueueFull(LlorchError):
    """The queue of this model has reached its limit."""

    code = "QUEUE_FULL"
    retriable = True


class DeadlineExceeded(LlorchError):
    """The deadline passed before the first token."""

    code = "DEADLINE_EXCEEDED"
    retriable = True


class Cancelled(LlorchError):
    """The job was cancelled or revoked."""

    spent: tuple[Usage, Timings] | None = None
    """In its worker: what it had used by then, if it had begun."""

    code = "CANCELLED"


class OutOfMemory(LlorchError):
    """The device ran out of memory during this job."""

    code = "OUT_OF_MEMORY"
    retriable = True


class AttemptsExhausted(LlorchError):
    """Every allowed attempt ended with the death of the engine or the worker."""

    code = "ATTEMPTS_EXHAUSTED"


class JobLost(LlorchError):
    """Redis has lost the job, with its data."""

    code = "JOB_LOST"
    retriable = True


class ModelLoadFailed(LlorchError):
    """A model file is missing, damaged or of no supported family."""

    code = "MODEL_LOAD_FAILED"


class InvalidLoadOption(ModelLoadFailed):
    """An option is out of range for this model, such as a context longer than its own."""


class ModelChanged(LlorchError):
    """The model was replaced while an answer was streamed, and the job begins again."""

    code = "MODEL_CHANGED"
    retriable = True


class InternalError(LlorchError):
    """A defect in this package."""

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
        JobLost,
        ModelLoadFailed,
        ModelChanged,
        InternalError,
    )
}


def as_told(error: BaseException, whose: str) -> LlorchError:
    """What others hear of ``error``: itself if it has a code, else :func:`defect_of` it."""
    if isinstance(error, LlorchError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory(f"the {whose} has no memory for this job")
    return defect_of(error, whose)


def defect_of(error: BaseException, whose: str) -> InternalError:
    """Says of ``error`` whose defect it is and its type, because its message may quote a text.

    A note says where it was raised: files, lines and names. No frame stays alive for it.
    """
    defect = InternalError(f"a defect of the {whose}: {type(error).__name__}")
    place = "".join(format_tb(error.__traceback__))
    defect.add_note(f"Traceback (most recent call last):\n{place}".rstrip())
    return defect


class BrokerUnavailable(Exception):
    """Redis does not answer or refuses. The message names the URL, without its password."""


class BrokerRefused(BrokerUnavailable):
    """The URL is wrong: malformed, or Redis rejects its user, password or database."""


class InvalidUrl(BrokerRefused):
    """The URL is malformed: a wrong setting, which no restart mends."""
