"""What Anthropic's documents mean in a chat, and a chat's answer in theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from llorch_worker.anthropic_api.messages import MessagesRequest
from llorch_worker.contract import (
    CallPart,
    Choice,
    Finished,
    GenerationResult,
    InvalidRequest,
    Started,
    Timings,
    Tokens,
    Usage,
)
from llorch_worker.contract.tools import FunctionCall, ToolCall

TOOL = {"name": "go", "description": "Goes.", "input_schema": {"type": "object"}}
STOP = {"stop_sequences": ["."]}
THINKING = {"type": "enabled", "budget_tokens": 2048}
THINK = {"thinking": THINKING}
LONG = {"role": "user", "content": "x" * 1_000_001}
END = ("end_turn", None)
TIMINGS = Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0)
USAGE = Usage(prompt=9, cached=4, completion=2)


def read(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    messages = messages or ({"role": "user", "content": "Hi"},)
    document = {"model": "demo", "max_tokens": 8, "messages": list(messages), **fields}
    return MessagesRequest.model_validate(document)


def wire(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    (request,) = read(*messages, **fields).to_requests()
    return request.wire()


def test_an_agents_history_becomes_the_turns_of_a_chat() -> None:
    history = (
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I go.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "go", "input": {"to": "é"}},
                {"type": "tool_use", "id": "toolu_2", "name": "go", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "c"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "there"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "lost"}],
                },
            ],
        },
    )
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]
    body = read(*history, system=system, tools=[TOOL, {"type": "web_search_20250305"}])
    (request,) = body.to_requests()
    called = [
        {"id": f"toolu_{n}", "function": {"name": "go", "arguments": text}}
        for n, text in ((1, '{"to": "\\u00e9"}'), (2, "{}"))
    ]
    assert request.wire()["messages"] == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I go.",
            "reasoning_content": "Hm.",
            "tool_calls": called,
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "there"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: lost"},
        {"role": "user", "content": "c"},
    ]
    assert [tool.function.name for tool in request.tools] == ["go"]
    assert body.ignored == ["web_search_20250305", "redacted_thinking"]


def test_fields_mean_what_they_mean_in_a_chat() -> None:
    asked = wire(stop_sequences=["x"], tools=[TOOL], tool_choice={"type": "any"})
    assert (asked["stop"], asked["tool_choice"], asked["max_tokens"]) == (["x"], "required", 8)
    choice = {"type": "tool", "name": "go", "disable_parallel_tool_use": True}
    asked = wire(tools=[TOOL], tool_choice=choice)
    assert asked["tool_choice"] == {"function": {"name": "go"}}
    assert asked["parallel_tool_calls"] is False
    assert "tool_choice" not in wire(tool_choice={"type": "auto"})
    schema = {"type": "object"}
    shape = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": shape}}, {"output_format": shape}):
        assert wire(**fields)["response_format"]["json_schema"] == {"schema": schema}
    prefilled = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "{"})
    assert wire(*prefilled)["continue_final_message"] is True


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (THINK, {"enable_thinking": True}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"enable_thinking": True, "reasoning_effort": "xhigh"},
        ),
    ],
)
def test_a_template_is_asked_for_thoughts_where_the_client_is(
    fields: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    assert wire(**fields)["chat_template_kwargs"] == kwargs


def test_a_shape_in_both_places_or_with_a_fault_is_refused_by_its_place() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    for fields, place in (
        ({"output_config": {"format": shape}, "output_format": shape},
         "output_config.format | output_format"),
        ({"output_format": {**shape, "schema": []}}, "output_format.json_schema.schema"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            read(**fields).to_requests()
        assert [fault.field for fault in refused.value.faults] == [place]


def test_stop_is_another_name_of_stop_sequences() -> None:
    assert wire(stop=["x"])["stop"] == ["x"]
    assert wire(stop="x", stop_sequences=[])["stop"] == ["x"]
    for fields in ({"stop": [""]}, {"stop": ["x"], "stop_sequences": ["y"]}):
        with pytest.raises(InvalidRequest) as refused:
            read(**fields).to_requests()
        assert "stop" in refused.value.faults[0].field.split(".")[0]
        assert ("stop_sequences" in refused.value.faults[0].field) == (len(fields) == 2)


def test_agents_may_offer_many_tools_with_long_names() -> None:
    names = ["n" * 100, *(f"tool-{number}" for number in range(199))]
    (request,) = read(tools=[TOOL | {"name": name} for name in names]).to_requests()
    assert [tool.function.name for tool in request.tools] == names


def test_no_form_of_the_text_is_dropped_beside_another() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(grammar='start: "a"', json_schema={"type": "object"}).to_requests()
    assert [fault.field for fault in refused.value.faults] == ["grammar | json_schema"]


def test_unknown_fields_are_named_and_ignored() -> None:
    extra = {"context_management": {}, "betas": ["x"], "diagnostics": None}
    body = read(**extra, metadata={"user_id": "u"}, service_tier="standard_only")
    assert body.to_requests()[0].wire()["messages"] == [{"role": "user", "content": "Hi"}]
    assert body.ignored == ["context_management", "betas"]


@pytest.mark.parametrize(
    ("fields", "faulty"),
    [
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"system": "s", "messages": [LONG]}, "messages.0.content"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL | {"input_schema": {"a": "x" * 10**6}}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice"),
    ],
)  # fmt: skip
def test_faults_have_the_clients_names(fields: dict[str, Any], faulty: str) -> None:
    body = read(**fields)
    with pytest.raises(InvalidRequest) as refused:
        body.to_requests()
    assert [fault.field for fault in refused.value.faults] == [faulty]


def result(**fields: Any) -> GenerationResult:
    choice = {"index": 0, "text": "", "token_ids": (1, 2), "finish_reason": "stop"} | fields
    return GenerationResult(
        id="job",
        model="demo",
        choices=(Choice(**choice),),
        usage=USAGE,
        seed=1,
        timings=TIMINGS,
        worker="w",
    )


def events_of(
    body: MessagesRequest, tokens: Sequence[Tokens], end: GenerationResult
) -> list[dict[str, Any]]:
    chunks = body.chunks(body.to_requests(), "job", 0)
    chunks.started(
        0, Started(worker="w", model="demo", prompt_tokens=9, cached_tokens=4, queue_ms=0)
    )
    reason = end.choices[0].finish_reason
    finished = Finished(finish_reason=reason, usage=USAGE, timings=TIMINGS)
    sent = [event for each in tokens for event in chunks.tokens(0, each)]
    sent += chunks.finished(0, finished, end if chunks.needs_results else None)
    return [*sent, *chunks.end()]


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """As Anthropic's client does it; the order of the events is checked."""
    start, *middle, delta, stop = [event for event in events if event["type"] != "ping"]
    assert (start["type"], stop) == ("message_start", {"type": "message_stop"})
    whole: dict[str, Any] = start["message"]
    is_open = False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(whole["content"])
                whole["content"].append({**event["content_block"]})
                is_open = True
            case "content_block_delta":
                assert is_open
                block = whole["content"][event["index"]]
                kind, text = event["delta"].values()
                field = kind.removesuffix("_delta").replace("input_json", "input")
                block[field] = (block[field] or "") + text
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    return whole | delta["delta"] | {"usage": delta["usage"]}


CALL = ToolCall(id="call_1", function=FunctionCall(name="go", arguments='{"to":"x"}'))


@pytest.mark.parametrize(
    ("fields", "chosen", "content", "end"),
    [
        ({}, {"text": "It rains."}, ["It rains."], END),
        ({}, {"text": ""}, [""], END),
        ({}, {"text": "It", "finish_reason": "length"}, ["It"], ("max_tokens", None)),
        ({}, {"text": "It", "finish_reason": "content_filter"}, ["It"], ("refusal", None)),
        (STOP, {"text": "It", "stop_string": "."}, ["It"], ("stop_sequence", ".")),
        (STOP, {"text": "It"}, ["It"], END),
        ({}, {"text": "It", "reasoning_content": "Hm."}, ["It"], END),
        (THINK, {"text": "It", "reasoning_content": "Hm."}, ["Hm.", "It"], END),
        (THINK, {"text": "", "reasoning_content": "Hm."}, ["Hm.", ""], END),
        (
            {"tools": [TOOL]},
            {"text": "I go.", "tool_calls": (CALL, CALL), "finish_reason": "tool_calls"},
            ["I go.", {"to": "x"}, {"to": "x"}],
            ("tool_use", None),
        ),
    ],
)  # fmt: skip
def test_a_stream_is_the_message_in_pieces(
    fields: dict[str, Any], chosen: dict[str, Any], content: list[Any], end: tuple[Any, ...]
) -> None:
    body, made = read(**fields), result(**chosen)
    message = body.answer([made], 0)
    shown = [
        block.get("text", block.get("thinking", block.get("input"))) for block in message["content"]
    ]
    assert shown == content
    assert (message["stop_reason"], message["stop_sequence"]) == end
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 2,
    }
    text, thought = chosen["text"], chosen.get("reasoning_content")
    tokens = [Tokens(index=0, ids=(1,), text="", reasoning_content=thought)] * bool(thought)
    tokens += [Tokens(index=1, ids=(2,), text=text[:1]), Tokens(index=2, ids=(), text=text[1:])]
    for number, call in enumerate(chosen.get("tool_calls", ())):
        parts = (
            CallPart(index=number, id=call.id, name=call.function.name),
            CallPart(index=number, arguments=call.function.arguments),
        )
        tokens += [Tokens(index=2, ids=(), text="", tool_calls=(part,)) for part in parts]
    events = events_of(body, tokens, made)
    streamed = put_together(events)
    for block in streamed["content"]:
        if block["type"] == "tool_use":
            assert block["input"] == CALL.function.arguments
            block["input"] = {"to": "x"}
    assert streamed == message
    assert [event["type"] for event in events][:3] == [
        "message_start",
        "content_block_start",
        "ping",
    ]
