"""OpenAI's own package against a gateway over a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.gateways import GatewayProcess
from tests.services import WorkerProcess

MODEL = "stories"
USER: ChatCompletionUserMessageParam = {"role": "user", "content": "Tell me a story"}


@pytest.fixture(scope="module")
def ai(gateway: GatewayProcess, story_worker: WorkerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).id == MODEL


def test_a_streamed_completion_is_the_whole_one(ai: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The cat"]
    whole = ai.completions.create(model=MODEL, prompt=prompts, n=2, seed=7, max_tokens=20)
    texts = ["", "", "", ""]
    stream = ai.completions.create(
        model=MODEL, prompt=prompts, n=2, seed=7, max_tokens=20, stream=True
    )
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4


def test_completions_take_token_ids(ai: openai.OpenAI) -> None:
    one = ai.completions.create(model=MODEL, prompt=[1, 403], max_tokens=4, temperature=0)
    two = ai.completions.create(
        model=MODEL, prompt=[[1, 403], [1, 407]], max_tokens=4, temperature=0
    )
    assert two.choices[0].text == one.choices[0].text
    assert one.usage is not None
    assert two.usage is not None
    assert (one.usage.prompt_tokens, two.usage.prompt_tokens) == (2, 4)


def test_completions_have_log_probabilities(ai: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 10, "seed": 7}
    (choice,) = ai.completions.create(**asked, logprobs=2).choices
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
    chunks = [chunk.choices[0] for chunk in ai.completions.create(**asked, logprobs=2, stream=True)]
    pieces = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert [token for piece in pieces for token in piece.tokens or ()] == found.tokens
    assert [at for piece in pieces for at in piece.text_offset or ()] == found.text_offset


def test_a_chat_is_answered(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(
        model=MODEL, messages=[USER], max_completion_tokens=8, n=2, seed=1, logprobs=True
    )
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == 8
    # An answer goes into the next turn as it is.
    turns = [USER, answer.choices[0].message, USER]
    again = ai.chat.completions.create(model=MODEL, messages=turns, max_tokens=4)  # type: ignore[arg-type]
    assert again.choices[0].message.content


def test_the_stream_helper_puts_a_chat_together(ai: openai.OpenAI) -> None:
    # It raises for texts that their length cuts off.
    asked = {"model": MODEL, "messages": [USER], "stop": ".", "seed": 5, "n": 2}
    with ai.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    expected = ai.chat.completions.create(**asked)
    assert [c.message.content for c in whole.choices] == [
        c.message.content for c in expected.choices
    ]
    assert whole.usage is not None
    assert expected.usage is not None
    assert whole.usage.completion_tokens == expected.usage.completion_tokens
    assert [c.finish_reason for c in whole.choices] == [c.finish_reason for c in expected.choices]


def test_our_own_fields_go_in_the_extra_body(ai: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": [USER], "max_tokens": 30}
    greedy = ai.chat.completions.create(**asked, temperature=0)
    narrow = ai.chat.completions.create(**asked, extra_body={"top_k": 1})
    assert narrow.choices[0].message.content == greedy.choices[0].message.content
    headers = {"Idempotency-Key": "one"}
    first, second = (ai.chat.completions.create(**asked, extra_headers=headers) for _ in range(2))
    assert first.id == second.id
    assert first.choices == second.choices


def test_faults_are_errors_of_the_package(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ai.chat.completions.create(model=MODEL, messages=[USER], temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ai.completions.create(model=MODEL, prompt="word " * 500, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ai.completions.create(model="other", prompt="x")


def test_many_streams_of_the_async_client_run_at_once(
    gateway: GatewayProcess, story_worker: WorkerProcess
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
