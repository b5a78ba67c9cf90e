"""``/v1/chat/completions`` as it is on the wire."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.services import WorkerProcess

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Tell me a story"}
DEADLINE_S = 1e-6


@pytest.fixture
def stories(http: httpx.Client, story_worker: WorkerProcess) -> httpx.Client:
    """The gateway over the real engine and a small trained model."""
    return http


def asked(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post(PATH, json={"messages": [USER], "max_tokens": 12, "seed": 3, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, **fields: Any) -> list[Any]:
    """The chunks of a stream that ends with [DONE]."""
    body = {"messages": [USER], "max_tokens": 12, "seed": 3, "stream": True, **fields}
    with http.stream("POST", PATH, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        *chunks, done = [
            line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")
        ]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_an_answer_has_the_shape_of_openai(stories: httpx.Client) -> None:
    answer = asked(stories)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 0
    assert answer.pop("system_fingerprint").startswith("fp_")
    (choice,) = answer.pop("choices")
    text = choice["message"].pop("content")
    assert text
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    usage = answer.pop("usage")
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert answer == {
        "object": "chat.completion",
        "model": "stories",
    }


def test_a_stream_begins_with_the_role_and_ends_with_a_reason(stories: httpx.Client) -> None:
    chunks = streamed(stories)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[-1] == {}
    assert all(list(delta) == ["content"] for delta in deltas[1:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    text = "".join(delta["content"] for delta in deltas[:-1])
    assert text == asked(stories)["choices"][0]["message"]["content"]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1


def test_each_choice_of_a_stream_has_its_role_text_and_reason(stories: httpx.Client) -> None:
    whole = asked(stories, n=3)["choices"]
    chunks = [chunk["choices"][0] for chunk in streamed(stories, n=3)]
    for number, choice in enumerate(whole):
        own = [chunk for chunk in chunks if chunk["index"] == number]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        text = "".join(chunk["delta"].get("content", "") for chunk in own)
        assert text == choice["message"]["content"]


def test_log_probabilities_are_streamed_as_they_are_returned(stories: httpx.Client) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    whole = asked(stories, **fields)["choices"][0]["logprobs"]["content"]
    assert len(whole) == 12
    for token in whole:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["logprob"] >= token["logprob"]
    pieces = [
        token
        for chunk in streamed(stories, **fields)
        for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [p["token"] for p in pieces] == [w["token"] for w in whole]
    assert [p["logprob"] for p in pieces] == pytest.approx([w["logprob"] for w in whole])


def test_the_cached_part_of_a_prompt_is_reported(stories: httpx.Client) -> None:
    messages = [{"role": "user", "content": "A very long question about cats and dogs. " * 3}]
    first, second = (asked(stories, messages=messages)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"]["cached_tokens"] > 0
    options = {"include_usage": True}
    last = streamed(stories, messages=messages, stream_options=options)[-1]
    assert last["choices"] == []
    assert last["usage"] == second


def test_a_prompt_is_scored_in_the_form_of_vllm(stories: httpx.Client) -> None:
    answer = asked(stories, prompt_logprobs=2)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert len(rest) == answer["usage"]["prompt_tokens"] - 1
    for entry in rest:
        assert len(entry) in (2, 3)
        ranked = {e["rank"]: e["logprob"] for e in entry.values() if e["rank"] is not None}
        assert sorted(ranked) == [1, 2]
        assert ranked[1] >= ranked[2]
    refused = stories.post(PATH, json={"messages": [USER], "prompt_logprobs": 1, "stream": True})
    assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_a_504(stories: httpx.Client, stream: bool) -> None:
    body = {"messages": [USER], "deadline_s": DEADLINE_S, "stream": stream}
    late = stories.post(PATH, json=body)
    assert (late.status_code, late.json()["error"]["llorch_code"]) == (504, "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_the_worker_can_refuse_is_a_400_too(stories: httpx.Client, stream: bool) -> None:
    messages = [{"role": "user", "content": "word " * 4_000}]
    refused = stories.post(PATH, json={"messages": messages, "stream": stream})
    error = refused.json()["error"]
    assert (refused.status_code, error["llorch_code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    # The words and the code by which litellm and langchain-openai know it.
    assert "This model's maximum context length is " in error["message"]
    assert "prompt is too long" in error["message"]
    assert error["code"] == "context_length_exceeded"
    alternating = stories.post(PATH, json={"messages": [USER, USER], "stream": stream})
    assert (alternating.status_code, alternating.json()["error"]["param"]) == (
        400,
        "messages.1.role",
    )
