"""Which journals are refused, and what a resumed job shares with a first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llorch_worker.contract import (
    Event,
    Finished,
    GenerationRequest,
    InternalError,
    Journal,
    JournalledChoice,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
    read_journal,
)
from llorch_worker.engine import Engine

PROMPT = "Once upon a time"
FINISHED = Finished(
    finish_reason="deadline",
    usage=Usage(prompt=1, completion=0),
    timings=Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0),
)


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{"prompt": PROMPT, "temperature": 0, "max_tokens": 10, "ignore_eos": True, **fields}
    )


@pytest.fixture(scope="module")
def journal(engine: Engine) -> JournalledChoice:
    """The first five tokens of ``request()``."""
    events = [e for e in engine.submit(request()).events() if isinstance(e, Tokens)]
    return read_journal(events[:5]).choices[0]


def with_changes(journal: JournalledChoice, **changes: Any) -> Journal:
    fields = {"token_ids": journal.token_ids, "text": journal.text, **changes}
    return Journal({0: JournalledChoice(**fields)})


CONTRADICTIONS: dict[str, tuple[dict[str, Any], Callable[[JournalledChoice], Journal], str]] = {
    "another text": ({}, lambda j: with_changes(j, text="secret"), "text of 6 characters"),
    "too much text": ({}, lambda j: with_changes(j, text=j.text + "x"), "its 5 tokens do not"),
    "an unknown id": ({}, lambda j: with_changes(j, token_ids=(10**6,)), "beyond the vocabulary"),
    "a negative id": ({}, lambda j: with_changes(j, token_ids=(-1,)), "beyond the vocabulary"),
    "more than max_tokens": (
        {"max_tokens": 4},
        lambda j: with_changes(j),
        "5 tokens, but max_tokens is 4",
    ),
    "tokens after the end": (
        {"stop": ["a"]},
        lambda j: with_changes(j),
        "5 tokens, but the choice ends after",
    ),
    "a choice too many": (
        {},
        lambda j: Journal({1: j}),
        "tokens of choice 1, but the request has choices 0 to 0",
    ),
    "no logprobs": ({"logprobs": 1}, lambda j: with_changes(j), "lacks log probabilities"),
    "logprobs of others": (
        {"logprobs": 1},
        lambda j: with_changes(j, logprobs=(TokenLogprobs(id=0, text="", logprob=0),) * 5),
        "of other tokens",
    ),
    "logprobs nobody wants": (
        {},
        lambda j: with_changes(j, logprobs=(TokenLogprobs(id=0, text="", logprob=0),) * 5),
        "has log probabilities, but the request does not ask",
    ),
}


@pytest.mark.parametrize(
    ("fields", "make", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys()
)
def test_a_journal_of_another_job_is_refused_without_quoting_it(
    engine: Engine,
    journal: JournalledChoice,
    fields: dict[str, Any],
    make: Callable[[JournalledChoice], Journal],
    message: str,
) -> None:
    with pytest.raises(InternalError, match=message) as error:
        engine.submit(request(**fields), journal=make(journal))
    assert "secret" not in str(error.value)
    assert journal.text not in str(error.value)
    assert engine.stats().waiting == engine.stats().running == 0


def test_text_released_beyond_the_journal_comes_next(
    engine: Engine, journal: JournalledChoice
) -> None:
    short = with_changes(journal, text=journal.text[:-2])
    generation = engine.submit(request(), journal=short)
    tokens = [event for event in generation.events() if isinstance(event, Tokens)]
    whole = generation.result(timeout=60).text
    assert tokens[0].index == 5
    assert tokens[0].text.startswith(journal.text[-2:])
    assert journal.text[:-2] + "".join(event.text for event in tokens) == whole

    # Nothing more to generate: it comes by itself.
    done = request(max_tokens=5)
    generation = engine.submit(done, journal=short)
    tokens = [event for event in generation.events() if isinstance(event, Tokens)]
    assert [(event.index, event.ids, event.text) for event in tokens] == [
        (5, (), journal.text[-2:])
    ]
    assert generation.result(timeout=60).text == journal.text


def test_text_released_by_a_deadline_shows_a_complete_choice(
    engine: Engine, journal: JournalledChoice
) -> None:
    """The clock of the next worker may say that there is time left; readers saw the end."""
    held = request(stop=[journal.text + "#"], deadline_s=1000)
    events: list[Event] = [
        Tokens(index=0, ids=journal.token_ids, text=""),
        Tokens(index=5, ids=(), text=journal.text),
    ]
    generation = engine.submit(held, journal=read_journal(events))
    choice = generation.result(timeout=60).choices[0]
    assert (choice.token_ids, choice.text) == (journal.token_ids, journal.text)
    assert choice.finish_reason == "deadline"
    assert not any(isinstance(event, Tokens) for event in generation.events())


def test_after_a_finished_event_only_the_result_is_rebuilt(
    engine: Engine, journal: JournalledChoice
) -> None:
    some = Journal({0: journal}, FINISHED)
    choices = engine.submit(request(n=2), journal=some).result(timeout=60).choices
    assert [choice.token_ids for choice in choices] == [journal.token_ids, ()]
    assert [choice.finish_reason for choice in choices] == ["deadline", "deadline"]


def test_a_resumed_job_is_cancelled_like_any_other(
    make_engine: Callable[..., Engine],
    watched: Callable[..., Any],
    gate: Callable[..., Any],
    journal: JournalledChoice,
) -> None:
    """One choice is complete and never ran, the other runs: both end, and no block is lost."""
    hold = gate(at=2)
    engine = make_engine(model=watched(hold))
    both = Journal({0: journal, 1: JournalledChoice(journal.token_ids[:2])})
    generation = engine.submit(request(n=2, max_tokens=5), journal=both)
    hold.wait_until_reached()
    generation.cancel()
    hold.open()
    assert [event.type for event in generation.events()][-1] == "cancelled"
    engine.check_integrity()
