"""``/v1/responses`` through the ``openai`` package and on the wire: answers and refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import Client
from tests.gateway.openai_types import check_response
from tests.gateway.talking import (
    ASK,
    MODEL,
    PATH,
    TOOL,
    events_of,
)
from tests.services import RedisServer, WorkerProcess, wait_until

MISNAMED = {"type": "function_call", "call_id": "c", "name": "a" * 257, "arguments": "{}"}


def test_a_response_has_every_field_of_openai(wire: httpx.Client) -> None:
    document = wire.post(
        PATH, json={**ASK, "instructions": "Tell.", "metadata": {"a": "b"}, "user": "u"}
    ).json()
    response = check_response(document)
    assert (response.status, response.model, response.instructions) == (
        "incomplete",
        MODEL,
        "Tell.",
    )
    assert document["system_fingerprint"].startswith("fp_")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.metadata, response.user) == ({"a": "b"}, "u")
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert check_response(wire.get(f"{PATH}/{response.id}").json()) == response


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"name": "no type"}]}, "tools.0"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "most"}, "truncation"),
        ({"n": 2}, "n"),
        ({"callback_url": "https://example.com/hook"}, "callback_url"),
        ({"guided_json": {}}, "guided_json"),
        ({"store": False, "background": True}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"type": "reasoning", "content": [{"text": 1}]}]}, "input.0"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [{"text": 1}]}]}, "input.0"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input.0"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
        ({"input": [{"type": 5}]}, "input.0"),
        ({"instructions": 5}, "instructions"),
        (
            {"instructions": "x", "input": [{"role": "user", "content": "x"}, MISNAMED]},
            "input.1.tool_calls.0.function.name",
        ),
        ({"input": "half a pair: \ud800"}, "input.0"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ],
)
def test_what_is_not_supported_is_named(
    wire: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    # httpx would not send half a pair.
    headers = {"Content-Type": "application/json"}
    answer = wire.post(PATH, content=json.dumps({**ASK, **fields}), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
    assert answer.json()["error"]["code"] == "invalid_request"


def test_fields_that_change_nothing_are_accepted(wire: httpx.Client) -> None:
    fields = {
        "truncation": "disabled",
        "reasoning": {"effort": None},
        "conversation": None,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "tool_choice": "auto",
        "tools": [],
        "stream_options": {"include_obfuscation": False},
    }
    answer = wire.post(PATH, json={**ASK, **fields})
    assert answer.status_code == 200
    assert "x-llorch-ignored" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_here_runs_or_reads_is_passed_over_and_named(
    wire: httpx.Client, stream: bool
) -> None:
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}
    fields = {
        "input": [{"role": "user", "content": ASK["input"]}, searched],
        "tools": [TOOL, {"type": "web_search", "filters": None}, {"type": "custom", "name": "x"}],
        "tool_choice": "none",
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto", "context": "all_turns"},
        "include": ["web_search_call.results", "reasoning.encrypted_content"],
        "stream": stream,
    }
    answer = wire.post(PATH, json={**ASK, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-llorch-ignored"].split(", ") == [
        "text.verbosity",
        "reasoning.summary",
        "web_search",
        "custom",
        "web_search_call",
        "web_search_call.results",
    ]
    document = events_of(answer)[-1]["response"] if stream else answer.json()
    assert [tool["name"] for tool in document["tools"]] == ["go"]
    plain = wire.post(PATH, json={**ASK, "tools": [TOOL], "tool_choice": "none"}).json()
    assert document["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_only_allowed_tools_are_called(wire: httpx.Client) -> None:
    home = {**TOOL, "name": "go_home"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function"}]}
    choice["tools"][0]["name"] = "go_home"
    fields = {"tools": [TOOL, home], "tool_choice": choice, "max_output_tokens": 60}
    document = wire.post(PATH, json={**ASK, **fields, "parallel_tool_calls": False}).json()
    (call,) = check_response(document).output
    assert call.name == "go_home"
    assert document["tool_choice"] == choice
    assert [tool["name"] for tool in document["tools"]] == ["go", "go_home"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_an_answer_of_its_own(
    wire: httpx.Client, stream: bool
) -> None:
    long = {**ASK, "input": "Lily went to the park. " * 200, "stream": stream}
    answer = wire.post(PATH, json=long)
    assert answer.status_code == 400
    assert answer.json()["error"]["llorch_code"] == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "go"}])
def test_a_function_is_called_and_the_conversation_goes_on(api: OpenAI, choice: Any) -> None:
    fields = {**ASK, "max_output_tokens": 60, "tools": [TOOL], "parallel_tool_calls": False}
    first = api.responses.create(**fields, tool_choice=choice)
    (call,) = first.output
    assert (first.status, call.type, call.name) == ("completed", "function_call", "go")
    assert json.loads(call.arguments)["to"] in ("park", "home")
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "She is there."}
    second = api.responses.create(**{**ASK, "input": [done]}, previous_response_id=first.id)
    whole = [{"role": "user", "content": ASK["input"]}, *first.output, done]
    again = api.responses.create(**{**ASK, "input": whole})
    assert second.output_text == again.output_text
    assert second.usage.input_tokens == again.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_what_it_waits_for(
    api: OpenAI,
    talker: WorkerProcess,
    redis_server: RedisServer,
    client: Client,
    stream: bool,
) -> None:
    with connect(redis_server.url) as redis, talker.paused():
        before = set(redis.scan_iter(keys.response("*")))
        with pytest.raises(openai.APITimeoutError):
            api.responses.create(**ASK, stream=stream, timeout=0.5)
        (key,) = wait_until(lambda: set(redis.scan_iter(keys.response("*"))) - before)
        job = client.job(str(key).rpartition(":")[2])
        wait_until(lambda: job.status().state == "cancelled")
    assert api.responses.retrieve(f"resp_{job.id}").status == "cancelled"
