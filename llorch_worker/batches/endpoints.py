"""The endpoints whose bodies a line may have, and what they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from llorch_worker.batches.lines import Call, Endpoint
from llorch_worker.contract import (
    Fault,
    GenerationRequest,
    InvalidRequest,
    JobRequest,
    describe,
)
from llorch_worker.openai_api.body import Body
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.completions import CompletionRequest
from llorch_worker.openai_api.responses import new_record, response_of
from llorch_worker.openai_api.responses_items import ItemReference
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.shape import WholeBody, read_as
from llorch_worker.openai_api.texts import EmbeddingsBody, RerankBody, ScoreBody, TextsBody

AnyBody = TypeVar("AnyBody", bound=WholeBody)


class _Completion:
    """A body of completions or chat."""

    def __init__(self, body: Body) -> None:
        _refuse_unlike(body, stream=(None, False))
        self._body = body
        self.requests: Sequence[GenerationRequest] = body.to_requests()

    def body(self, results: Sequence[Any]) -> dict[str, Any]:
        return dict(self._body.answer(results, int(time.time())))


class _Texts:
    """A body of embeddings, rerank or score."""

    def __init__(self, body: TextsBody) -> None:
        self._body = body
        self.requests: Sequence[JobRequest] = body.to_requests()

    def body(self, results: Sequence[Any]) -> dict[str, Any]:
        answer = self._body.answer(results, int(time.time()))
        return answer.model_dump(mode="json", exclude_none=True)


class _Response:
    """A body of responses. It continues no other, and none continues it: nothing is stored."""

    def __init__(self, body: ResponseRequest) -> None:
        _refuse_unlike(
            body,
            stream=(None, False),
            background=(None, False),
            store=(None, False),
            previous_response_id=(None,),
        )
        self._body = body.model_copy(update={"store": False})
        self._items = [item for item in body.input if not isinstance(item, ItemReference)]
        if len(self._items) < len(body.input):
            raise InvalidRequest.from_fault("input", "not in a batch", "item_reference")
        self.requests: Sequence[GenerationRequest] = (body.to_generation(self._items),)

    def body(self, results: Sequence[Any]) -> dict[str, Any]:
        record = new_record(
            self._body,
            self._items,
            self.requests[0],
            job_id=results[0].id,
            created_at=int(time.time()),
        )
        return response_of(record, results[0]).model_dump(mode="json")


def _refuse_unlike(body: BaseModel, **allowed: tuple[object, ...]) -> None:
    faults = [
        Fault(field=name, rule="not in a batch", got=describe(getattr(body, name)))
        for name, values in allowed.items()
        if getattr(body, name) not in values
    ]
    if faults:
        raise InvalidRequest.from_faults(faults)


def _endpoint(kind: type[AnyBody], call: Callable[[AnyBody], Call]) -> Endpoint:
    def understand(body: dict[str, Any], refuse_unknown: bool) -> Call:
        read = read_as(kind, body)
        if refuse_unknown:
            read.refuse_unknown()
        return call(read)

    return understand


ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": _endpoint(ChatRequest, _Completion),
    "/v1/completions": _endpoint(CompletionRequest, _Completion),
    "/v1/responses": _endpoint(ResponseRequest, _Response),
    "/v1/embeddings": _endpoint(EmbeddingsBody, _Texts),
    "/v1/rerank": _endpoint(RerankBody, _Texts),
    "/v1/score": _endpoint(ScoreBody, _Texts),
}
