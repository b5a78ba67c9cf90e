"""Thoughts have a place of their own in answers, chunks and turns."""

from __future__ import annotations

from typing import Any

from llorch_worker.contract import Choice, GenerationResult, Timings, Tokens, Usage
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.chat_answer import chat_completion

USER = {"role": "user", "content": "Weather?"}
TOOL = {"type": "function", "function": {"name": "look_up"}}
RESULT = GenerationResult(
    id="job",
    model="demo",
    choices=(
        Choice(
            index=0,
            text="It rains.",
            reasoning_content="Hm.",
            token_ids=(1, 2),
            finish_reason="stop",
        ),
    ),
    usage=Usage(prompt=1, completion=2),
    seed=1,
    timings=Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0),
    worker="w",
)


def deltas(**fields: Any) -> list[dict[str, Any]]:
    body = ChatRequest.model_validate({"messages": [USER], "stream": True, **fields})
    chunks = body.chunks(body.to_requests(), "job", 0)
    sent = [
        *chunks.tokens(0, Tokens(index=0, ids=(1,), text="", reasoning_content="Hm.")),
        *chunks.tokens(0, Tokens(index=1, ids=(2,), text="It rains.")),
    ]
    return [chunk["choices"][0]["delta"] for chunk in sent]


def test_a_chats_answer_has_the_thought_beside_its_content() -> None:
    message = chat_completion(RESULT, 0)["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "It rains."
    (choice,) = RESULT.choices
    plain = RESULT.model_copy(
        update={"choices": (choice.model_copy(update={"reasoning_content": None}),)}
    )
    assert "reasoning_content" not in chat_completion(plain, 0)["choices"][0]["message"]


def test_a_streams_thought_comes_at_once_also_where_the_text_may_be_calls() -> None:
    for fields in ({}, {"tools": [TOOL]}):
        first, thought, text = deltas(**fields)
        assert first["role"] == "assistant"
        assert thought == {"reasoning_content": "Hm."}
        assert text == {"content": "It rains."}


def test_an_answer_with_a_thought_becomes_a_turn() -> None:
    answer = {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm."}
    body = ChatRequest.model_validate({"messages": [USER, answer, USER]})
    (request,) = body.to_requests()
    assert request.messages is not None
    assert request.messages[1].reasoning_content == "Hm."
