"""A reader that comes back sees every token and character once, however the stream was cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.client.stream import Position, StreamEntry
from llorch_worker.contract import CallPart, CancelledEvent, Event, Restarted, Started, Tokens

TEXT = "abcdefghijklmnop"
"""A thought, then a text, then a call, whose beginning is the k."""
THOUGHT_ENDS, TEXT_ENDS = 5, 10
STARTED = Started(worker="w", model="m", prompt_tokens=1, queue_ms=0)


def stream(
    cuts: list[int],
    lags: list[int],
    first_id: int,
    choices: int = 1,
    after: tuple[int, int] = (0, 0),
    *,
    has_ids: bool = True,
) -> list[StreamEntry]:
    """A stream of sixteen tokens, one letter each, in events that end at ``cuts``; the letters of
    each lag behind its ids. ``after``: how many tokens and letters came before."""
    start, chars = after
    ends = [*sorted({cut for cut in cuts if cut > start}), len(TEXT)]
    events: list[Event] = [STARTED]
    for number, end in enumerate(ends):
        upto = len(TEXT) if end == len(TEXT) else max(chars, end - lags[number % len(lags)])
        ids = tuple(range(start, end)) if has_ids else ()
        events += [
            Tokens(choice=i, index=start if has_ids else 0, ids=ids, **letters(chars, upto))
            for i in range(choices)
        ]
        start, chars = end, upto
    events.append(CancelledEvent())
    return [StreamEntry(f"{first_id + i}-0", event) for i, event in enumerate(events)]


def letters(begin: int, end: int) -> dict[str, Any]:
    """What an event says that has these of :data:`TEXT`."""
    arguments = TEXT[max(begin, TEXT_ENDS + 1) : end]
    first = {"id": "call", "name": "f"} if begin <= TEXT_ENDS < end else {}
    call = CallPart(index=0, arguments=arguments, **first)
    return {
        "reasoning_content": TEXT[begin : min(end, THOUGHT_ENDS)] or None,
        "text": TEXT[max(begin, THOUGHT_ENDS) : min(end, TEXT_ENDS)],
        "tool_calls": (call,) if first or arguments else None,
    }


def letters_of(tokens: list[Tokens]) -> str:
    calls = [part for event in tokens for part in event.tool_calls or ()]
    thought = "".join(event.reasoning_content or "" for event in tokens)
    text = "".join(event.text for event in tokens)
    return thought + text + "".join("k" * (part.id == "call") + part.arguments for part in calls)


CUTS = st.lists(st.integers(1, 15), max_size=6)
LAGS = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@given(CUTS, LAGS, CUTS, LAGS, st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_a_stream_that_was_cut_anew_gives_the_rest(
    cuts: list[int],
    lags: list[int],
    new_cuts: list[int],
    new_lags: list[int],
    seen: int,
    n: int,
    has_ids: bool,
) -> None:
    reader = Position()
    entries = stream(cuts, lags, 1, n, has_ids=has_ids)
    found = [reader.rest(entry) for entry in entries[: seen + 1]]
    if reader.ended:
        return
    again = Position.parse(str(reader))
    entries = stream(new_cuts, new_lags, 1_000, n, has_ids=has_ids)
    found += [again.rest(entry) for entry in entries]
    for choice in range(n):
        tokens = [e for e in found if isinstance(e, Tokens) and e.choice == choice]
        ids = [i for event in tokens for i in event.ids]
        assert ids == (list(range(len(TEXT))) if has_ids else [])
        assert letters_of(tokens) == TEXT
        assert all(e.index == e.ids[0] for e in tokens if e.ids)
    assert found[-1] == CancelledEvent()
    assert Position.parse(str(again)).ended


@given(CUTS, LAGS, CUTS, LAGS, st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_a_run_that_goes_on_from_before_lost_writes_gives_the_rest(
    cuts: list[int],
    lags: list[int],
    new_cuts: list[int],
    new_lags: list[int],
    seen: int,
    kept: int,
    has_ids: bool,
) -> None:
    if not has_ids:
        kept = 0  # a run does not go on after text without ids
    reader = Position()
    entries = stream(cuts, lags, 1, has_ids=has_ids)[: seen + 1]
    found = [reader.rest(entry) for entry in entries]
    if reader.ended:
        return
    journal = [e for _, e in entries[: kept + 1] if isinstance(e, Tokens)]
    after = sum(len(e.ids) for e in journal), len(letters_of(journal))
    entries = stream(new_cuts, new_lags, 1_000, after=after, has_ids=has_ids)
    found += [reader.rest(entry) for entry in entries]
    tokens = [e for e in found if isinstance(e, Tokens)]
    ids = [i for event in tokens for i in event.ids]
    assert ids == (list(range(len(TEXT))) if has_ids else [])
    assert letters_of(tokens) == TEXT


def test_events_without_tokens_come_once() -> None:
    entries = stream([4], [0], 1)
    reader = Position()
    for entry in entries[:2]:
        reader.rest(entry)
    again = Position.parse(str(reader))
    found = [again.rest(entry) for entry in entries]
    assert [event and event.type for event in found] == [None, None, "tokens", "cancelled"]


@pytest.mark.parametrize("wrong", ["", "x", "5", "5-0:", "5-0:1", "5-0:1.2,", "5-0:1.-2", "٣-0"])
def test_what_is_no_id_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="not an id"):
        Position.parse(wrong)


def test_a_reader_who_comes_back_after_a_restart_gets_the_new_text_from_its_first_token() -> None:
    reader = Position()
    for number, event in enumerate((STARTED, Tokens(index=0, ids=(1, 2), text="ab")), 1):
        reader.rest(StreamEntry(f"{number}-0", event))
    restarted = Restarted(worker="w", attempt=2)
    after: list[Event] = [
        restarted,
        STARTED,
        Tokens(index=0, ids=(7,), text="x"),
        Tokens(index=1, ids=(8, 9), text="yz"),
        CancelledEvent(),
    ]
    entries = [StreamEntry(f"{number}-0", event) for number, event in enumerate(after, 10)]
    # It may leave again at any place.
    for leaves in range(len(after)):
        again = Position.parse(str(reader))
        found = [again.rest(entry) for entry in entries[:leaves]]
        again = Position.parse(str(again))
        found += [again.rest(entry) for entry in entries]
        assert [event for event in found if event is not None] == after
