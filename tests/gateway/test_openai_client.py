"""OpenAI's own package against a gateway over a real worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionUserMessageParam,
)
from pydantic import BaseModel, Field

from tests.gateways import GatewayProcess
from tests.services import WorkerProcess

MODEL = "stories"
USER: ChatCompletionUserMessageParam = {"role": "user", "content": "Tell me a story"}


def test_models_are_listed(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL


def test_a_streamed_completion_is_the_whole_one(api: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The cat"]
    whole = api.completions.create(model=MODEL, prompt=prompts, n=2, seed=7, max_tokens=20)
    texts = ["", "", "", ""]
    stream = api.completions.create(
        model=MODEL, prompt=prompts, n=2, seed=7, max_tokens=20, stream=True
    )
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4


def test_ids_and_scores_belong_to_their_prompts(api: openai.OpenAI, wire: httpx.Client) -> None:
    texts = ["The cat", "Once"]
    prompts = [wire.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    body: Any = {"model": MODEL, "prompt": texts, "n": 2, "max_tokens": 3, "seed": 1}
    extra = {"return_token_ids": True}
    whole: list[Any] = list(
        api.completions.create(**body, extra_body={**extra, "prompt_logprobs": 0}).choices
    )
    assert [c.prompt_token_ids for c in whole] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [len(c.prompt_logprobs) for c in whole] == [len(c.prompt_token_ids) for c in whole]
    ids: dict[int, list[int]] = {}
    told = []
    for chunk in api.completions.create(**body, stream=True, extra_body=extra):
        for choice in chunk.choices:
            given: Any = choice
            ids.setdefault(choice.index, []).extend(given.token_ids)
            told += [choice.index] if "prompt_token_ids" in given.model_extra else []
    assert ids == {c.index: c.token_ids for c in whole}
    assert sorted(told) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {"add_special_tokens": False},
        {"parse_special": True},
        {"add_special_tokens": False, "parse_special": True},
    ],
)
def test_the_ids_of_a_prompt_are_those_that_the_job_reads(
    api: openai.OpenAI, fields: dict[str, bool]
) -> None:
    answer = api.completions.create(
        model=MODEL,
        prompt="The cat</s>",
        max_tokens=1,
        extra_body={**fields, "return_token_ids": True},
    )
    given: Any = answer.choices[0]
    assert answer.usage is not None
    assert len(given.prompt_token_ids) == answer.usage.prompt_tokens


def test_completions_have_log_probabilities(api: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 10, "seed": 7}
    (choice,) = api.completions.create(**asked, logprobs=2).choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [
        sum(map(len, found.tokens[:position])) for position in range(len(found.tokens))
    ]
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
    chunks = [
        chunk.choices[0] for chunk in api.completions.create(**asked, logprobs=2, stream=True)
    ]
    pieces = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert [token for piece in pieces for token in piece.tokens or ()] == found.tokens
    assert [at for piece in pieces for at in piece.text_offset or ()] == found.text_offset


def test_the_stream_helper_puts_a_chat_together(api: openai.OpenAI) -> None:
    # It raises for texts that their length cuts off.
    asked = {"model": MODEL, "messages": [USER], "stop": ".", "seed": 5, "n": 2}
    with api.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    expected = api.chat.completions.create(**asked)
    assert [c.message.content for c in whole.choices] == [
        c.message.content for c in expected.choices
    ]
    assert whole.usage is not None
    assert expected.usage is not None
    assert whole.usage.completion_tokens == expected.usage.completion_tokens
    assert [c.finish_reason for c in whole.choices] == [c.finish_reason for c in expected.choices]


def test_faults_are_errors_of_the_package(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model=MODEL, messages=[USER], temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model=MODEL, prompt="word " * 4_000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="other", prompt="x")


def test_many_streams_of_the_async_client_run_at_once(
    gateway: GatewayProcess, talker: WorkerProcess
) -> None:
    async def main() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[USER], max_tokens=16, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async with client:
            texts = await asyncio.gather(*map(one, range(32)))
            whole = await client.chat.completions.create(
                model=MODEL, messages=[USER], stop=".", seed=31
            )
            async with client.chat.completions.stream(
                model=MODEL, messages=[USER], stop=".", seed=31
            ) as helper:
                final = await helper.get_final_completion()
        text = whole.choices[0].message.content
        assert text
        assert final.choices[0].message.content == text
        assert text.startswith(texts[31]) or texts[31].startswith(text)
        return texts

    assert all(asyncio.run(main()))


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)


def test_parse_fills_a_model(api: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": [USER], "seed": 3}
    parsed = api.chat.completions.parse(**asked, n=2, response_format=Pet)
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Pet)
        assert choice.finish_reason == "stop"
    with api.chat.completions.stream(**asked, n=2, response_format=Pet) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [c.message.parsed for c in final.choices] == [c.message.parsed for c in parsed.choices]


LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look_up"}}]
)
def test_a_call_is_returned_and_streamed(api: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [USER], "tools": [LOOK_UP], "tool_choice": choice, "seed": 3,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = api.chat.completions.create(**asked).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")

    deltas = [chunk.choices[0] for chunk in api.chat.completions.create(**asked, stream=True)]
    assert [delta.finish_reason for delta in deltas[-1:]] == ["tool_calls"]
    assert not any(delta.delta.content for delta in deltas)
    parts = [part for delta in deltas for part in delta.delta.tool_calls or ()]
    assert [part.index for part in parts] == [0] * len(parts)
    assert [part.id is None for part in parts] == [False] + [True] * (len(parts) - 1)

    with api.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    (same,) = final.message.tool_calls or ()
    assert same.function.arguments == call.function.arguments


def test_text_beside_tools_is_streamed_as_text(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [USER], "tools": [LOOK_UP], "seed": 3, "max_tokens": 20
    }  # fmt: skip
    whole = api.chat.completions.create(**asked).choices[0]
    chunks = list(api.chat.completions.create(**asked, stream=True))
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert (text, chunks[-1].choices[0].finish_reason) == (whole.message.content, "length")
