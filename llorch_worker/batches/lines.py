"""What a line asks for, and the document that answers it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from llorch_worker.batches.raw_lines import MOST_LINE_BYTES, RawLine
from llorch_worker.contract import (
    EmbedRequest,
    GenerationRequest,
    InvalidRequest,
    JobRequest,
    JobResult,
    LlorchError,
    RerankRequest,
    ScoreRequest,
    describe,
)
from llorch_worker.contract.values import UnreadableJson, read_json
from llorch_worker.openai_api.errors import body_of, nothing_came, status_of
from llorch_worker.openai_api.shape import Shape, read_as

End = Sequence[JobResult] | LlorchError
"""How a line ended: the results of its requests, or why there are none."""


class Call(Protocol):
    """The body of a line, understood."""

    @property
    def requests(self) -> Sequence[JobRequest]: ...

    def body(self, results: Sequence[Any]) -> dict[str, Any]:
        """What the endpoint answers."""


Endpoint = Callable[[dict[str, Any], bool], Call]
"""Understands the body of a request, and refuses fields that nobody here knows if the second
argument says so. Raises ``InvalidRequest``."""


class NotRun(LlorchError):
    """The batch ended before the line did."""


class BatchExpired(NotRun):
    code: ClassVar[str] = "batch_expired"


class BatchCancelled(NotRun):
    code: ClassVar[str] = "batch_cancelled"


class Line(ABC):
    """One line of a batch. Its ``requests`` are an error if it cannot be understood."""

    requests: Sequence[JobRequest] | LlorchError

    def __init__(self, raw: RawLine) -> None:
        self.number = raw.number
        self.size_bytes = len(raw.content)

    @property
    def jobs(self) -> int:
        """A line that cannot be understood waits like one job."""
        return 1 if isinstance(self.requests, LlorchError) else len(self.requests)

    @abstractmethod
    def document(self, job_id: str, end: End) -> dict[str, Any]:
        """The answer. ``job_id``: the first job's."""


class _Fields(Shape):
    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class OpenAILine(Line):
    """``{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}``."""

    def __init__(
        self, raw: RawLine, fields: dict[str, Any] | InvalidRequest, rules: OpenAIRules
    ) -> None:
        super().__init__(raw)
        self._custom_id: str | None = None
        self._call: Call | None = None
        if isinstance(fields, dict):
            custom_id = fields.get("custom_id")
            self._custom_id = custom_id if isinstance(custom_id, str) else None
            try:
                self._call = rules.call(raw.number, fields)
                self.requests = self._call.requests
            except InvalidRequest as error:
                self.requests = error
        else:
            self.requests = fields

    def document(self, job_id: str, end: End) -> dict[str, Any]:
        response: dict[str, Any] | None
        error = None
        if not isinstance(end, LlorchError):
            end = nothing_came((result.ended, result.usage) for result in end) or end
        match end:
            case NotRun() as end:
                response, error = None, {"code": end.code, "message": end.message}
            case LlorchError() as end:
                response = {"status_code": status_of(end), "body": body_of(end).model_dump()}
            case results:
                assert self._call is not None
                response = {"status_code": 200, "body": self._call.body(results)}
        if response is not None:
            response["request_id"] = job_id
        head = {"id": f"batch_req_{job_id.replace('-', '')}", "custom_id": self._custom_id}
        return {**head, "response": response, "error": error}


class OpenAIRules:
    """``endpoints``: those that lines may name, by url. ``repeated``: see :class:`Survey`."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        repeated: frozenset[int],
        *,
        refuse_unknown: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._repeated = repeated
        self._refuse_unknown = refuse_unknown

    def call(self, number: int, fields: dict[str, Any]) -> Call:
        """Raises ``InvalidRequest``."""
        line = read_as(_Fields, fields)
        if number in self._repeated:
            raise _fault("custom_id", "an earlier line has it", line.custom_id)
        endpoint = self._endpoints.get(line.url)
        if endpoint is None:
            raise _fault("url", f"must be {' or '.join(self._endpoints)}", line.url)
        return endpoint(line.body, self._refuse_unknown)


class BareLine(Line):
    """A request with the contract's own fields."""

    def __init__(self, raw: RawLine, fields: dict[str, Any] | InvalidRequest) -> None:
        super().__init__(raw)
        try:
            if isinstance(fields, InvalidRequest):
                raise fields
            self.requests = (bare_request(fields),)
        except InvalidRequest as error:
            self.requests = error

    def document(self, job_id: str, end: End) -> dict[str, Any]:
        head = {"line": self.number, "id": job_id}
        if isinstance(end, LlorchError):
            return {**head, "error": end.document().model_dump(mode="json")}
        return {**head, "result": end[0].model_dump(mode="json", exclude_none=True)}


def bare_request(fields: Mapping[str, Any]) -> JobRequest:
    """The request with these fields: for vectors if it has ``input``, for a ranking with
    ``documents`` and for scores with ``text_1``. Raises ``InvalidRequest``."""
    named = {"input": EmbedRequest, "documents": RerankRequest, "text_1": ScoreRequest}
    kind = next((kind for name, kind in named.items() if name in fields), GenerationRequest)
    return kind(**fields)


def fields_of(raw: RawLine) -> dict[str, Any] | InvalidRequest:
    """The line as a JSON object, or what is wrong with it."""
    if len(raw.content) > MOST_LINE_BYTES:
        rule = f"must be at most {MOST_LINE_BYTES} bytes"
        return InvalidRequest.from_fault(f"line {raw.number}", rule, "more")
    try:
        fields = read_json(raw.content)
    except UnreadableJson as error:
        return _fault(f"line {raw.number}", str(error), raw.content.decode("latin"))
    if not isinstance(fields, dict):
        return _fault(f"line {raw.number}", "must be one JSON object", fields)
    return fields


def encoded(document: dict[str, Any]) -> bytes:
    """One line of a file. Half a surrogate pair, which a text may hold, stays escaped."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace") + b"\n"


def is_failure(document: dict[str, Any]) -> bool:
    """Whether a document of :meth:`Line.document` answers with an error."""
    response = document.get("response")
    return document.get("error") is not None or (
        response is not None and response["status_code"] != 200
    )


def _fault(field: str, rule: str, got: object) -> InvalidRequest:
    return InvalidRequest.from_fault(field, rule, describe(got))
