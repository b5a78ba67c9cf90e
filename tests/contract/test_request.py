"""What a request accepts, and how it refuses the rest."""

from __future__ import annotations

import json
import re
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.contract import GenerationRequest, InvalidRequest, request_digest
from llorch_worker.contract.job_request import MAX_METADATA_BYTES
from llorch_worker.contract.message import MAX_PROMPT_CHARS

CHAT = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}


def faults_of(**fields: Any) -> dict[str, str]:
    """The rules that ``fields`` break, by field."""
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(**fields)
    return {fault.field: fault.rule for fault in caught.value.faults}


def test_defaults_are_those_of_the_contract() -> None:
    request = GenerationRequest(prompt="Once")
    assert (request.most_tokens, request.min_tokens, request.temperature) == (256, 0, 1.0)
    assert (request.top_p, request.top_k, request.min_p) == (1.0, 0, 0.0)
    assert (request.presence_penalty, request.frequency_penalty) == (0.0, 0.0)
    assert (request.repetition_penalty, request.n, request.priority) == (1.0, 1, "normal")
    assert request.seed is None
    assert request.stop == ()


def test_null_is_the_default_of_fields_that_have_none() -> None:
    null = dict.fromkeys(("prompt_token_ids", "messages", "logit_bias", "tool_choice"))
    assert GenerationRequest(prompt="Once", **null) == GenerationRequest(prompt="Once")
    turn = {"role": "user", "content": "a", "tool_calls": None}
    assert GenerationRequest(messages=[turn]) == GenerationRequest(messages=CHAT)
    choice = {"regex": "a", "choice": None}
    request = GenerationRequest(prompt="Once", structured_outputs=choice)
    assert request.wire()["structured_outputs"] == {"regex": "a"}


def test_minus_one_turns_top_k_off_and_has_a_seed_drawn() -> None:
    request = GenerationRequest(prompt="Once", top_k=-1, seed=-1)
    assert request == GenerationRequest(prompt="Once")
    assert request.wire() == {"prompt": "Once"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * (MAX_PROMPT_CHARS + 1)}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids.0"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "7"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": 2.1}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "temperature": float("inf")}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.01}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "min_p": -0.1}, "min_p"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "seed": -2}, "seed"),
        ({"prompt": "a", "seed": True}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop.0"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 17}, "n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"3": 101}}, "logit_bias.3"),
        ({"prompt": "a", "priority": 3}, "priority"),
        ({"prompt": "a", "deadline_s": 0}, "deadline_s"),
        ({"prompt": "a", "metadata": {"k": "v" * MAX_METADATA_BYTES}}, "metadata"),
        ({"prompt": "a", "metadata": {"k": {1, 2}}}, "metadata"),
        ({"prompt": "a", "metadata": {"k": "half a character: \ud83d"}}, "metadata"),
        ({"prompt": "a", "metadata": {"\ud83d": 1}}, "metadata"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"prompt": "a", "structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
        ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"prompt": "a", "structured_outputs": {"regex": "a", "grammar": "b"}},
            "structured_outputs",
        ),
        ({"messages": CHAT, "tools": [TOOL, TOOL]}, "tools"),
        ({"messages": CHAT, "tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name"),
        *(
            (
                {"messages": CHAT, "tools": [{"function": {"name": "a", "parameters": schema}}]},
                "tools.0.function.parameters",
            )
            for schema in ({"type": "array"}, {"type": "string"}, {"type": ["null", "string"]})
        ),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "tools": [TOOL], "tool_choice": OTHER}, "tool_choice"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        (
            {
                "messages": CHAT,
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "response_format | structured_outputs",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert list(faults_of(**fields)) == [field]


NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("fields", "field", "inner"),
    [
        ({"response_format": {**NAMED, "schema": {}}}, "response_format.schema", "json_schema"),
        ({"tools": [{**TOOL, "parameters": {}}]}, "tools.0.parameters", "function"),
    ],
)
def test_a_field_one_level_too_high_is_refused_by_where_it_belongs(
    fields: dict[str, Any], field: str, inner: str
) -> None:
    faults = faults_of(messages=CHAT, **fields)
    assert faults[field] == f"unknown field; it belongs in {inner}"


def test_a_field_is_not_said_to_mean_itself() -> None:
    faults = faults_of(messages=[{**CHAT[0], "arguments": "x"}])
    assert faults["messages.0.arguments"] == "unknown field"


def test_a_tool_may_be_chosen_by_its_name_alone() -> None:
    chosen = {"type": "function", "name": TOOL["function"]["name"]}
    request = GenerationRequest(messages=CHAT, tools=[TOOL], tool_choice=chosen)
    assert request.forces_a_call
    assert request.tool_choice.function.name == chosen["name"]
    assert list(faults_of(messages=CHAT, tools=[TOOL], tool_choice={**chosen, "name": "b"})) == [
        "tool_choice"
    ]


WRONG = (3, "x", [], [3], {"x": 3}, [{"x": 3}], True, Decimal(1), date(2026, 1, 2), b"x")


@pytest.mark.parametrize(
    "place",
    [
        *((name,) for name in GenerationRequest.model_fields),
        *(("messages", 0), ("messages", 0, "content"), ("messages", 0, "tool_calls")),
        *(("tools", 0), ("tools", 0, "function"), ("tools", 0, "function", "parameters")),
        *(("tool_choice", "function"), ("response_format", "json_schema")),
        *(("structured_outputs", name) for name in ("json", "regex", "choice")),
        *(("logit_bias", "3"), ("stop", 0)),
    ],
    ids=lambda place: ".".join(map(str, place)),
)
def test_no_refusal_of_a_wrong_type_speaks_of_python(place: tuple[str | int, ...]) -> None:
    said = []
    for wrong in WRONG:
        value: Any = wrong
        for part in reversed(place):
            value = [value] if part == 0 else {part: value}
        try:
            GenerationRequest(**{"prompt": "a", **value})
        except InvalidRequest as error:
            said.append(error.message)
    assert said
    assert list(filter(PYTHON.search, said)) == []


PYTHON = re.compile(r"\b[Dd]ict|[Tt]uple|instance|Input|None|Decimal|datetime|\bint\b|\bstr\b")


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": None}],
)
def test_exactly_one_prompt_is_required(fields: dict[str, Any]) -> None:
    assert list(faults_of(**fields)) == ["prompt | prompt_token_ids | messages"]


def test_all_faults_are_reported_at_once() -> None:
    faults = faults_of(temperature=-1, top_p=7, wrong=1, max_tokens=2, min_tokens=3, n="x")
    assert set(faults) == {
        "prompt | prompt_token_ids | messages",
        "temperature",
        "top_p",
        "wrong",
        "min_tokens",
        "n",
    }


def test_a_refusal_names_rule_and_size_but_never_the_prompt() -> None:
    secret = "the-secret-prompt " * 60_000
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(prompt=secret, stop=[secret], metadata={"k": secret}, nope=secret)
    text = str(caught.value) + repr(caught.value.args)
    assert "the-secret" not in text
    assert f"a string of {len(secret)} characters" in text
    assert f"at most {MAX_PROMPT_CHARS} characters" in text


def test_a_refusal_never_names_a_key_of_the_users() -> None:
    secret = "the-secret-key " * 60_000
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(prompt="a", logit_bias={secret: 1.0})
    assert "the-secret" not in str(caught.value) + repr(caught.value.args)
    assert [fault.field for fault in caught.value.faults] == ["logit_bias"]


def nested(depth: int) -> dict[str, Any]:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return {"k": value}


@pytest.mark.parametrize("depth", [600, 1_000, 3_000, 100_000])
def test_deeply_nested_metadata_is_refused(depth: int) -> None:
    assert faults_of(prompt="a", metadata=nested(depth), top_p=7).keys() == {"top_p", "metadata"}


@pytest.mark.parametrize("field", ["max_tokens", "top_k"])
def test_a_number_of_thousands_of_digits_is_refused_by_its_size(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(prompt="a", **{field: 10**5000})
    (fault,) = caught.value.faults
    assert (fault.field, fault.got) == (field, "an integer of 16610 bits")


def test_a_request_never_prints_the_users_text() -> None:
    request = GenerationRequest(
        prompt="private words", stop="private stop", metadata={"who": "private"}, max_tokens=7
    )
    assert "private" not in f"{request!r} {request} {request.summary()}"
    assert "max_tokens=7" in request.summary()


@given(
    st.fixed_dictionaries(
        {"prompt": st.text(min_size=1, max_size=50)},
        optional={
            "max_tokens": st.integers(1, 4096),
            "temperature": st.floats(0, 2),
            "seed": st.integers(0, 2**63 - 1),
            "stop": st.lists(st.text(min_size=1, max_size=5), max_size=16),
            "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=4),
            "priority": st.sampled_from(["high", "normal", "low"]),
            "metadata": st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
            "structured_outputs": st.sampled_from(
                [{"json": {"type": "object"}}, {"choice": ["a"]}]
            ),
        },
    )
)
def test_a_request_survives_the_wire(fields: dict[str, Any]) -> None:
    request = GenerationRequest(**fields)
    assert GenerationRequest(**json.loads(json.dumps(request.wire()))) == request


def test_tools_and_their_answers_survive_the_wire() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    request = GenerationRequest(
        messages=[
            *CHAT,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "look_up"}},
        prompt_logprobs=0,
        max_tokens=0,
    )
    assert GenerationRequest(**json.loads(json.dumps(request.wire()))) == request


@pytest.mark.parametrize("number", [10**100, 2**64, -(2**63) - 1])
def test_a_number_that_a_grammar_would_round_is_refused(number: int) -> None:
    schema = {"properties": {"a": {"type": "integer", "minimum": number}}}
    function = {"name": "f", "parameters": schema}
    rule = "whole numbers must be at least -2**63 and at most 2**64 - 1"
    assert faults_of(prompt="a", structured_outputs={"json": schema}) == {
        "structured_outputs.json": rule
    }
    turns = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": function}]
    assert faults_of(messages=turns, tools=tools) == {"tools.0.function.parameters": rule}


def test_all_tools_together_are_bounded() -> None:
    def asking(count: int) -> dict[str, Any]:
        schema = {"description": "d" * 200_000}
        functions = [{"name": f"f{number}", "parameters": schema} for number in range(count)]
        return {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": function} for function in functions],
        }

    GenerationRequest(**asking(5))
    assert faults_of(**asking(6)) == {"tools": "must be at most 1048576 bytes as JSON together"}


def test_the_keys_of_a_users_schema_are_in_no_fault() -> None:
    schema = {"properties": {"private": 10**5000}, "type": {1, 2}}
    faults = faults_of(prompt="a", structured_outputs={"json": schema})
    assert "private" not in str(faults)


def test_a_null_is_not_given() -> None:
    every = dict.fromkeys(GenerationRequest.model_fields)
    request = GenerationRequest(**{**every, "prompt": "x"})
    assert request == GenerationRequest(prompt="x")
    assert request.model_fields_set == {"prompt"}
    with pytest.raises(InvalidRequest, match="max_tokns: unknown field; did you mean max_tokens"):
        GenerationRequest(prompt="x", max_tokns=None)


def test_an_answer_without_a_maximum_is_bounded_by_256_or_by_the_context() -> None:
    plain = GenerationRequest(prompt="x")
    assert (plain.max_tokens, plain.most_tokens, plain.least_tokens) == (None, 256, 256)
    cut = GenerationRequest(prompt="x", cut_max_tokens=True)
    assert (cut.max_tokens, cut.most_tokens, cut.least_tokens) == (None, None, 1)
    assert cut.wire() == {"prompt": "x", "cut_max_tokens": True}
    assert GenerationRequest(**cut.wire()) == cut
    least = GenerationRequest(prompt="x", cut_max_tokens=True, min_tokens=999)
    assert least.min_tokens == least.least_tokens == 999
    assert "min_tokens" in faults_of(prompt="x", min_tokens=257)
    assert "min_tokens" in faults_of(prompt="x", cut_max_tokens=True, max_tokens=8, min_tokens=9)


def test_a_digest_is_of_what_was_named_in_any_order_and_spelling_of_a_number() -> None:
    named = {"prompt": "x", "idempotency_key": "k", "metadata": {"a": 1, "b": [0.5, 2e20]}}
    turned = {**dict(reversed(named.items())), "metadata": {"b": [0.5, 2 * 10**20], "a": 1.0}}
    first = request_digest([GenerationRequest(**named)])
    assert first == request_digest([GenerationRequest(**turned)])
    assert first == request_digest([GenerationRequest(**{**named, "idempotency_key": "another"})])
    assert first != request_digest([GenerationRequest(**named, temperature=1.0)])
    assert request_digest([GenerationRequest(prompt="x")]) == "", "nobody asks for it"
