"""The events of all attempts add up to what each choice has so far."""

from __future__ import annotations

import pytest

from llorch_worker.contract import (
    CancelledEvent,
    Event,
    Finished,
    InternalError,
    JournalledChoice,
    Restarted,
    Started,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
    decode_event,
    encode_event,
    read_journal,
)

STARTED = Started(worker="w", model="m", prompt_tokens=3, queue_ms=1.5)
FINISHED = Finished(
    finish_reason="stop",
    usage=Usage(prompt=3, completion=2),
    timings=Timings(queue_ms=1, prefill_ms=2, first_token_ms=3, decode_ms=4),
)


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(id=token_id, text="t", logprob=-0.1 * token_id)


def test_a_journal_without_events_is_false() -> None:
    assert not read_journal([])
    assert not read_journal([STARTED, STARTED.model_copy(update={"attempt": 2})])


def test_tokens_of_all_attempts_are_put_together_choice_by_choice() -> None:
    events: list[Event] = [
        STARTED,
        Tokens(choice=0, index=0, ids=(5, 6), text="ab"),
        Tokens(choice=2, index=0, ids=(9,), text=""),
        STARTED.model_copy(update={"attempt": 2, "worker": "other"}),
        Tokens(choice=0, index=2, ids=(7,), text="c"),
        Tokens(choice=2, index=1, ids=(9,), text="\N{SNOWMAN}"),
        Tokens(choice=0, index=3, ids=(), text="d"),
    ]
    journal = read_journal(events)
    assert journal
    assert journal.choices == {
        0: JournalledChoice((5, 6, 7), "abcd"),
        2: JournalledChoice((9, 9), "\N{SNOWMAN}"),
    }
    assert journal.terminal is None
    assert read_journal(map(decode_event, map(encode_event, events))) == journal


def test_logprobs_are_kept_if_the_events_have_them() -> None:
    events = [
        Tokens(index=0, ids=(5,), text="a", logprobs=(logprob(5),)),
        Tokens(index=1, ids=(6, 7), text="bc", logprobs=(logprob(6), logprob(7))),
        # What a deadline releases: text without tokens.
        Tokens(index=3, ids=(), text="d"),
    ]
    assert read_journal(events).choices[0] == JournalledChoice(
        (5, 6, 7), "abcd", (logprob(5), logprob(6), logprob(7))
    )


@pytest.mark.parametrize("first", [True, False])
def test_logprobs_of_only_some_tokens_are_refused(first: bool) -> None:
    entry = (logprob(5),)
    events = [
        Tokens(index=0, ids=(5,), text="", logprobs=entry if first else None),
        Tokens(index=1, ids=(5,), text="", logprobs=None if first else entry),
    ]
    with pytest.raises(InternalError, match="2 tokens and the log probabilities of 1"):
        read_journal(events)


@pytest.mark.parametrize(("index", "what"), [(3, "a gap"), (1, "an overlap"), (0, "an overlap")])
def test_a_gap_and_an_overlap_are_named(index: int, what: str) -> None:
    events = [
        Tokens(choice=1, index=0, ids=(5, 6), text="secret"),
        Tokens(choice=1, index=index, ids=(7,), text="secret"),
    ]
    with pytest.raises(InternalError, match=f"choice 1 has {what}.* {index} .* 2 tokens") as error:
        read_journal(events)
    assert "secret" not in str(error.value)


def test_the_first_terminal_event_is_kept() -> None:
    journal = read_journal([STARTED, FINISHED, CancelledEvent()])
    assert journal
    assert journal.terminal == FINISHED


def test_the_repr_of_a_journal_hides_its_text() -> None:
    entry = TokenLogprobs(id=5, text="secret", logprob=-1)
    journal = read_journal([Tokens(index=0, ids=(77,), text="secret", logprobs=(entry,))])
    assert "secret" not in repr(journal)
    assert "77" not in repr(journal)
    assert "1 tokens" in repr(journal)


def started(model: str, arithmetic: str = "") -> Started:
    changed = {"model_fingerprint": model, "arithmetic": arithmetic}
    return STARTED.model_copy(update=changed)


def test_a_journal_says_which_model_its_tokens_are_of_and_what_computed_them() -> None:
    events: list[Event] = [
        started("a", "one"),
        Tokens(index=0, ids=(1,), text="a"),
        started("a", "two"),
        Tokens(index=1, ids=(2,), text="b"),
        # This worker died before its first token.
        started("b", "three"),
    ]
    journal = read_journal(events)
    assert (journal.fingerprint, journal.arithmetic) == ("a", ("one", "two"))
    mixed = read_journal([*events, Tokens(index=2, ids=(3,), text="c")])
    assert mixed.fingerprint is None


def test_what_a_restart_has_voided_is_not_in_the_journal() -> None:
    events: list[Event] = [
        started("a", "one"),
        Tokens(index=0, ids=(1, 2), text="ab"),
        FINISHED,
        Restarted(worker="w", attempt=2),
        started("b", "two"),
        Tokens(index=0, ids=(3,), text="c"),
    ]
    journal = read_journal(map(decode_event, map(encode_event, events)))
    assert journal.choices == {0: JournalledChoice((3,), "c")}
    assert (journal.fingerprint, journal.arithmetic) == ("b", ("two",))
    assert journal.terminal is None
    assert not read_journal(events[:4])
