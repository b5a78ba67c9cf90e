from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llorch_worker.anthropic_api.messages import CountTokensRequest, MessagesRequest
from llorch_worker.contract import Fault, GenerationRequest, InvalidRequest
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.completions import CompletionRequest
from llorch_worker.openai_api.known_fields import ELSEWHERE, KNOWN_FIELDS
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.shape import faults_of
from llorch_worker.openai_api.tokens import DetokenizeRequest, TokenizeRequest

USER = {"role": "user", "content": "Hi"}
LEAST: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [USER]},
    ResponseRequest: {"input": "x"},
    MessagesRequest: {"messages": [USER], "max_tokens": 1},
    CountTokensRequest: {"messages": [USER]},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}
BODIES = pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)


def faults(kind: type[BaseModel], **fields: Any) -> list[Fault]:
    try:
        kind.model_validate({**LEAST[kind], **fields})
    except ValidationError as error:
        return faults_of(error.errors())
    return []


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (CompletionRequest, "max_tokns", "max_tokens"),  # a letter is lost,
        (CompletionRequest, "temmperature", "temperature"),  # added,
        (ChatRequest, "temparature", "temperature"),  # wrong
        (ChatRequest, "tempearture", "temperature"),  # or swapped
        (ChatRequest, "maxTokens", "max_tokens"),
        (ChatRequest, "top-p", "top_p"),
        (ChatRequest, "message_s", "messages"),
        (ResponseRequest, "max_output_token", "max_output_tokens"),
        (MessagesRequest, "stop_sequnces", "stop_sequences"),
        (CountTokensRequest, "tolls", "tools"),
        (TokenizeRequest, "add_special_token", "add_special_tokens"),
        (DetokenizeRequest, "modle", "model"),
        (ChatRequest, "guided_jsno", "guided_json"),
    ],
)
def test_a_known_field_but_for_a_slip_is_refused_with_its_name(
    kind: type[BaseModel], wrong: str, right: str
) -> None:
    (fault,) = faults(kind, **{wrong: 3})
    assert (fault.field, fault.rule) == (wrong, f"unknown field; did you mean {right}?")
    assert faults(kind, **{wrong: None}) == [], "null is not given"


@pytest.mark.parametrize(
    ("kind", "fields", "place"),
    [
        (ChatRequest, {"stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        (ResponseRequest, {"text": {"formt": {}}}, "text.formt"),
        (ResponseRequest, {"reasoning": {"efort": "low"}}, "reasoning.efort"),
        (
            ResponseRequest,
            {"tools": [{"type": "function", "name": "f", "paramters": {}}]},
            "tools.0.function.paramters",
        ),
        (MessagesRequest, {"thinking": {"type": "enabled", "dispaly": 1}}, "thinking.dispaly"),
        (MessagesRequest, {"tool_choice": {"type": "tool", "nam": "f"}}, "tool_choice.nam"),
        (MessagesRequest, {"output_config": {"efforts": "low"}}, "output_config.efforts"),
    ],
)
def test_a_slip_is_refused_in_what_is_read_tolerantly(
    kind: type[BaseModel], fields: dict[str, Any], place: str
) -> None:
    assert [fault.field for fault in faults(kind, **fields)] == [place]


def test_a_slip_is_reported_with_all_other_faults() -> None:
    found = faults(ChatRequest, max_tokns=3, stream="{x}", stream_options={"include_usge": 1})
    assert {fault.field for fault in found} == {
        "max_tokns",
        "stream",
        "stream_options.include_usge",
    }


@BODIES
def test_no_name_that_any_service_knows_is_taken_for_a_slip(kind: type[BaseModel]) -> None:
    ours = {
        name for body in LEAST for name in body.model_fields
    } | GenerationRequest.model_fields.keys()
    names = {*ELSEWHERE, *KNOWN_FIELDS, *ours} - kind.model_fields.keys()
    assert {
        name: faults(kind, **{name: "x"}) for name in names if faults(kind, **{name: "x"})
    } == {}


@BODIES
@pytest.mark.parametrize("name", ["foo", "x", "nn", "my_tag", "temperatures_of_rooms"])
def test_any_other_name_stays_accepted(kind: type[BaseModel], name: str) -> None:
    assert faults(kind, **{name: 1}) == []


@pytest.mark.parametrize(
    ("fields", "field", "right"),
    [
        ({"max_tokns": 3}, "max_tokns", "max_tokens"),
        ({"response_format": {"tpye": "text"}}, "response_format.tpye", "type"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "regex"),
        (
            {"tools": [{"function": {"name": "f", "parametrs": {}}}]},
            "tools.0.function.parametrs",
            "parameters",
        ),
    ],
)
def test_what_refuses_all_unknown_fields_says_which_one_was_meant(
    fields: dict[str, Any], field: str, right: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(messages=[USER], **fields)
    rules = {fault.field: fault.rule for fault in caught.value.faults}
    assert rules[field] == f"unknown field; did you mean {right}?"


def test_a_history_of_another_service_may_have_any_fields() -> None:
    turn = {"role": "assistant", "content": "Hi", "contents": 1, "reasonings": 1, "nmae": "x"}
    assert faults(ChatRequest, messages=[turn]) == []
