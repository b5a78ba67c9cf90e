"""Events and results read back as they were written."""

from __future__ import annotations

import pytest
from kombu.utils.json import dumps, loads
from pydantic import ValidationError

from llorch_worker.contract import (
    CancelledEvent,
    Choice,
    ErrorDocument,
    Event,
    Failed,
    Finished,
    GenerationResult,
    Started,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    Usage,
    decode_event,
    encode_event,
)

TIMINGS = Timings(queue_ms=1, prefill_ms=2, first_token_ms=3, decode_ms=4)
LOGPROBS = TokenLogprobs(
    id=5, text=" a", logprob=-0.5, top=(TokenLogprob(id=5, text=" a", logprob=-0.5),)
)


@pytest.mark.parametrize(
    "event",
    [
        Started(worker="w", model="m", prompt_tokens=3, queue_ms=1.5),
        Tokens(choice=1, index=4, ids=(5, 6), text="é☃"),
        Tokens(index=0, ids=(5,), text=" a", logprobs=(LOGPROBS,)),
        Finished(finish_reason="stop", usage=Usage(prompt=3, completion=2), timings=TIMINGS),
        Failed(error=ErrorDocument(code="INTERNAL", message="m", retriable=True)),
        CancelledEvent(),
    ],
    ids=lambda event: event.type,
)
def test_an_event_survives_the_stream(event: Event) -> None:
    assert decode_event(encode_event(event).encode()) == event


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValidationError):
        decode_event('{"type": "tokenz"}')


def result() -> GenerationResult:
    return GenerationResult(
        id="job",
        model="m",
        choices=(Choice(index=0, text="private words", token_ids=(1, 2), finish_reason="stop"),),
        usage=Usage(prompt=3, completion=2),
        seed=7,
        timings=TIMINGS,
        worker="w",
    )


def test_a_result_is_plain_json_for_a_stock_app() -> None:
    document = loads(dumps(result()))
    assert document["text"] == "private words"
    assert document["choices"][0]["token_ids"] == [1, 2]
    assert GenerationResult.model_validate(document) == result()


def test_the_repr_of_a_result_hides_its_text() -> None:
    assert "private" not in f"{result()!r} {result()}"
    assert "2 new tokens" in repr(result())
