"""What the events of a response make of a job's events, and its messages of its items."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from llorch_worker.contract import (
    CallPart,
    Choice,
    FinishReason,
    FunctionCall,
    GenerationResult,
    Timings,
    TokenLogprobs,
    Tokens,
    ToolCall,
    Usage,
)
from llorch_worker.openai_api.responses import ResponseRecord, new_record, response_of
from llorch_worker.openai_api.responses_events import ResponseEvents
from llorch_worker.openai_api.responses_items import ReasoningItem
from llorch_worker.openai_api.responses_request import ResponseRequest
from tests.gateway.openai_types import check_event, check_response
from tests.gateway.talking import TOOL, kinds

MESSAGE = {"role": "user", "content": "Sure?"}
TIMINGS = Timings(queue_ms=1000, prefill_ms=500, first_token_ms=1500, decode_ms=500)


def record(**fields: Any) -> ResponseRecord:
    request = ResponseRequest.model_validate({"model": "m", "input": "x", **fields})
    generation = request.to_generation(request.input)
    made = new_record(request, request.input, generation, job_id="j", created_at=1_000)
    stored = ResponseRecord.model_validate_json(made.model_dump_json(by_alias=True))
    assert stored == made
    return stored


def result(text: str, reason: FinishReason = "stop", **fields: Any) -> GenerationResult:
    choice = Choice(index=0, text=text, token_ids=(1,), finish_reason=reason, **fields)
    return GenerationResult(
        id="j",
        model="m",
        choices=(choice,),
        usage=Usage(prompt=3, cached=2, completion=1 if text else 0),
        seed=1,
        timings=TIMINGS,
        worker="w",
    )


def deltas(pieces: list[str], end: GenerationResult, **fields: Any) -> list[str]:
    events = ResponseEvents(record(**fields))
    made = [*events.begin(), *events.start()]
    for index, piece in enumerate(pieces):
        made += events.tokens(Tokens(index=index, ids=(1,), text=piece))
    made += events.end(end)
    for event in made:
        check_event(json.loads(json.dumps(event)))
    assert kinds(made)[-1] == "response.completed"
    return [event["delta"] for event in made if "delta" in event]


@pytest.mark.parametrize("called", [False, True])
def test_a_thought_is_an_item_before_the_text_or_the_calls(called: bool) -> None:
    text = "" if called else "It rains."
    call = ToolCall(id="c", function=FunctionCall(name="go", arguments="{}"))
    more: dict[str, Any] = {"tool_calls": (call,)} if called else {}
    end = result(text, "tool_calls" if called else "stop", reasoning_content="Hm, hm.", **more)
    second = "function_call" if called else "message"
    output = response_of(record(tools=[TOOL]), end).output
    assert [item.type for item in output] == ["reasoning", second]
    first = output[0]
    assert isinstance(first, ReasoningItem)
    assert first.content is not None
    assert [part.text for part in first.content] == ["Hm, hm."]
    check_response(response_of(record(tools=[TOOL]), end).model_dump(mode="json", by_alias=True))
    # Also if the reader comes late, or the job's last events are lost.
    for seen in (["Hm,", " hm."], ["Hm,"], []):
        events = ResponseEvents(record(tools=[TOOL]))
        made = [*events.begin(), *events.start()]
        for index, piece in enumerate(seen):
            made += events.tokens(Tokens(index=index, ids=(1,), text="", reasoning_content=piece))
        if len(seen) == 2:
            made += events.tokens(Tokens(index=2, ids=(1,), text=text))
        made += events.end(end)
        for event in made:
            check_event(json.loads(json.dumps(event)))
        thought = [e["delta"] for e in made if e["type"] == "response.reasoning_text.delta"]
        assert "".join(thought) == "Hm, hm."
        places = [e["output_index"] for e in made if "output_index" in e]
        assert places == sorted(places)
        assert kinds(made).count("response.reasoning_text.done") == 1
        ended = [e["item"] for e in made if e["type"] == "response.output_item.done"]
        assert ended == [item.model_dump(mode="json", by_alias=True) for item in output]


def test_a_thought_of_an_earlier_response_belongs_to_the_turn_behind_it() -> None:
    answer = response_of(record(), result("It rains.", reasoning_content="Hm.")).output
    items = [item.model_dump(mode="json", by_alias=True) for item in answer]
    request = ResponseRequest.model_validate({"model": "m", "input": [*items, MESSAGE]})
    messages = request.to_generation(request.input).messages
    assert messages is not None
    assert [(m.role, m.reasoning_content, m.content) for m in messages] == [
        ("assistant", "Hm.", "It rains."),
        ("user", None, "Sure?"),
    ]


@pytest.mark.parametrize("kept", ["content", "encrypted_content", "summary", None])
def test_a_thought_comes_back_in_whatever_a_client_keeps_of_it(kept: str | None) -> None:
    asked = record(include=["reasoning.encrypted_content"])
    answer = response_of(asked, result("It rains.", reasoning_content="Hm.")).output
    check_response(
        response_of(asked, result("It rains.", reasoning_content="Hm.")).model_dump(mode="json")
    )
    thought, text = (item.model_dump(mode="json", by_alias=True) for item in answer)
    assert "Hm" not in thought["encrypted_content"]
    thought["summary"] = [{"type": "summary_text", "text": "Hm."}]
    for name in {"content", "encrypted_content", "summary"} - {kept}:
        thought[name] = [] if name == "summary" else None
    if kept is None:
        thought["encrypted_content"] = "gAAAAnother service's"
    request = ResponseRequest.model_validate({"input": [thought, text, MESSAGE]})
    messages = request.to_generation(request.input).messages
    assert messages is not None
    assert messages[0].reasoning_content == ("Hm." if kept else None)
    assert messages[0].content == "It rains."


def test_calls_of_tools_with_a_text_become_calls_of_functions() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "run", "input": "print(1)"}
    done = {"type": "custom_tool_call_output", "call_id": "1", "output": "1"}
    request = ResponseRequest.model_validate({"input": [MESSAGE, call, done]})
    messages = request.to_generation(request.input).messages
    assert messages is not None
    (made,) = messages[1].tool_calls or ()
    assert (made.function.name, json.loads(made.function.arguments)) == (
        "run",
        {"input": "print(1)"},
    )
    assert (messages[2].role, messages[2].content) == ("tool", "1")


@pytest.mark.parametrize("text", ["", "Let me go. "])
@pytest.mark.parametrize("seen", range(6))
def test_calls_are_items_behind_the_text(text: str, seen: int) -> None:
    calls = tuple(
        ToolCall(id=each, function=FunctionCall(name="go", arguments='{"to": "park"}'))
        for each in ("c", "d")
    )
    end = result(text, "tool_calls", tool_calls=calls)
    output = response_of(record(tools=[TOOL]), end).output
    assert [item.type for item in output] == ["message"] * bool(text) + ["function_call"] * 2
    assert len({item.id for item in output}) == len(output)
    pieces: list[dict[str, Any]] = [
        {"text": text},
        {"tool_calls": (CallPart(index=0, id="c", name="go"),)},
        {"tool_calls": (CallPart(index=0, arguments='{"to": '),)},
        {
            "tool_calls": (
                CallPart(index=0, arguments='"park"}'),
                CallPart(index=1, id="d", name="go", arguments='{"to": "p'),
            )
        },
        {"tool_calls": (CallPart(index=1, arguments='ark"}'),)},
    ]
    # The reader may come late, or the job's last events be lost.
    events = ResponseEvents(record(tools=[TOOL]))
    made = [*events.begin(), *events.start()]
    for index, piece in enumerate(pieces[:seen]):
        made += events.tokens(Tokens(index=index, ids=(1,), **{"text": "", **piece}))
    made += events.end(end)
    for event in made:
        check_event(json.loads(json.dumps(event)))
    places = [event["output_index"] for event in made if "output_index" in event]
    assert places == sorted(places)
    ended = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in ended] == [item.id for item in output]
    arguments = [e["delta"] for e in made if e["type"].endswith("arguments.delta")]
    assert "".join(arguments) == '{"to": "park"}' * 2


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    events = ResponseEvents(record(tools=[TOOL]))
    part = CallPart(index=0, id="c", name="go", arguments='{"to": "p')
    made = [*events.begin(), *events.tokens(Tokens(index=0, ids=(1,), text="", tool_calls=(part,)))]
    made += events.end(result("", "length"))
    (item,) = [e["item"] for e in made if e["type"] == "response.output_item.done"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"to": "p')


def scored(own: bytes) -> TokenLogprobs:
    return TokenLogprobs(id=1, text=own.decode(errors="replace"), logprob=-1.0, bytes=tuple(own))


def test_the_log_probabilities_join_to_the_text_that_is_sent() -> None:
    thought = (scored(b"<think>"), scored(b"Hm"), scored(b"</think>"))
    # A character in two tokens, and a stop string that begins within a token.
    tokens = (scored(b"\n\xc3"), scored(b"\xa9"), scored(b" ok<stop>"), scored(b"</s>"))
    events = ResponseEvents(record(top_logprobs=0))
    made = [*events.begin(), *events.start()]
    hm = Tokens(index=0, ids=(1,) * 3, text="", reasoning_content="Hm", logprobs=thought)
    made += events.tokens(hm)
    made += events.tokens(Tokens(index=3, ids=(1,), text="", logprobs=tokens[:1]))
    made += events.tokens(Tokens(index=4, ids=(1,), text="é", logprobs=tokens[1:2]))
    made += events.tokens(Tokens(index=5, ids=(1,) * 2, text=" ok", logprobs=tokens[2:]))
    made += events.end(result("é ok", reasoning_content="Hm", logprobs=(*thought, *tokens)))
    deltas = [event for event in made if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in made if event["type"] == "response.output_text.done"]
    sent = [token["bytes"] for event in deltas for token in event["logprobs"]]
    assert sent == [[0xC3], [0xA9]]
    assert bytes(chain(*(token["bytes"] for token in done["logprobs"]))).decode() == "é ok"


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        (result("x"), "completed", None),
        (result("x", "length"), "incomplete", None),
        (result("x", "deadline"), "incomplete", None),
        (result("x", "content_filter"), "incomplete", None),
        (result("", "deadline"), "failed", "DEADLINE_EXCEEDED"),
    ],
)
def test_a_status_follows_from_the_end(
    end: GenerationResult, status: str, error: str | None
) -> None:
    document = response_of(record(), end).model_dump(by_alias=True)
    check_response(document)
    assert document["status"] == status
    assert (document["error"] and document["error"]["llorch_code"]) == error
    assert document["completed_at"] == (1_002 if status == "completed" else None)


def test_parts_and_roles_become_those_of_the_contract() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    request = ResponseRequest.model_validate(
        {
            "instructions": "first",
            "input": [
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": parts},
                {"type": "function_call", "call_id": "1", "name": "go", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "go", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "there"},
                {"type": "function_call_output", "call_id": "2", "output": parts},
            ],
        }
    )
    messages = request.to_generation(request.input).messages
    assert messages is not None
    assert [(turn.role, turn.content) for turn in messages] == [
        ("system", "first"),
        ("system", "be kind"),
        ("user", "a\nb"),
        ("assistant", None),
        ("tool", "there"),
        ("tool", "a\nb"),
    ]
    assert [call.id for call in messages[3].tool_calls or ()] == ["1", "2"]
