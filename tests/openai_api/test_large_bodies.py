"""A wrong body costs a gateway no more than it says, however large it is."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llorch_worker.contract import InvalidRequest
from llorch_worker.contract.request import MAX_MESSAGES
from llorch_worker.gateway.job_document import JobRequest
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.completions import CompletionRequest
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.tokens import DetokenizeRequest

MANY = 100_000
MESSAGE = {"role": "user", "content": [{"type": "text", "text": "Hi"}] * 10}


def count_of_errors(kind: type[BaseModel], body: dict[str, Any]) -> int:
    """What is wrong with the body, before all but the first faults are dropped."""
    try:
        document = kind.model_validate(body)
        if isinstance(document, CompletionRequest):
            document.to_requests()
    except ValidationError as error:
        return error.error_count()
    except InvalidRequest as error:
        return len(error.faults)
    return 0


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [0] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}),
        (ChatRequest, {f"field{number}": 0 for number in range(MANY)}),
        (ChatRequest, {"messages": [{f"field{number}": 0 for number in range(MANY)}]}),
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": "Hi", "logit_bias": {str(i): "x" for i in range(MANY)}}),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}),
        (ResponseRequest, {"input": [0] * MANY}),
        (JobRequest, {"prompt_token_ids": ["x"] * MANY}),
        (JobRequest, {"messages": [0] * MANY}),
    ],
)
def test_a_hundred_thousand_wrong_values_are_one_fault(
    kind: type[BaseModel], body: dict[str, Any]
) -> None:
    assert count_of_errors(kind, body) == 1


def test_the_largest_requests_are_not_too_large() -> None:
    assert count_of_errors(ChatRequest, {"messages": [MESSAGE] * MAX_MESSAGES}) == 0
    assert count_of_errors(CompletionRequest, {"prompt": [1] * MANY}) == 0
    assert count_of_errors(DetokenizeRequest, {"tokens": [1] * MANY}) == 0
