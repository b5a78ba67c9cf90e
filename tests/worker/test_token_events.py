from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.contract import CallPart, CancelledEvent, Event, Tokens
from llorch_worker.contract.result import TokenLogprobs
from llorch_worker.worker.publisher import merge_tokens


def tokens(choice: int, start: int, count: int) -> Tokens:
    ids = tuple(range(start, start + count))
    return Tokens(choice=choice, index=start, ids=ids, text="".join(f"{i}." for i in ids))


def of_choice(events: list[Event], choice: int) -> list[Tokens]:
    return [event for event in events if isinstance(event, Tokens) and event.choice == choice]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=30))
def test_every_token_stays_once_and_in_order_within_its_choice(
    steps: list[tuple[int, int]],
) -> None:
    counts = [0, 0, 0]
    events: list[Event] = []
    for choice, count in steps:
        events.append(tokens(choice, counts[choice], count))
        counts[choice] += count
    joined = merge_tokens(events)
    assert len(joined) == sum(count > 0 for count in counts)
    for choice, count in enumerate(counts):
        parts = of_choice(joined, choice)
        assert [i for part in parts for i in part.ids] == list(range(count))
        assert "".join(part.text for part in parts) == "".join(f"{i}." for i in range(count))


def test_tokens_do_not_move_past_another_kind_of_event() -> None:
    first, second = tokens(0, 0, 1), tokens(0, 1, 1)
    assert merge_tokens([first, CancelledEvent(), second]) == [first, CancelledEvent(), second]


def test_tokens_with_a_gap_stay_apart() -> None:
    first, second = tokens(0, 0, 1), tokens(0, 5, 1)
    assert merge_tokens([first, second]) == [first, second]


def test_logprobs_are_joined_with_their_tokens() -> None:
    events = [
        tokens(0, i, 1).model_copy(
            update={"logprobs": (TokenLogprobs(id=i, text=str(i), logprob=-1.0),)}
        )
        for i in range(3)
    ]
    (joined,) = merge_tokens(events)
    assert isinstance(joined, Tokens)
    assert joined.logprobs is not None
    assert [entry.id for entry in joined.logprobs] == [0, 1, 2]


def test_the_calls_of_joined_tokens_keep_their_parts_in_order() -> None:
    parts = [
        CallPart(index=0, id="a", name="f"),
        CallPart(index=0, arguments='{"x"'),
        CallPart(index=0, arguments=": 1}"),
        CallPart(index=1, id="b", name="g"),
    ]
    events = [tokens(0, i, 1).model_copy(update={"tool_calls": (p,)}) for i, p in enumerate(parts)]
    (joined,) = merge_tokens([*events, tokens(0, 4, 1)])
    assert isinstance(joined, Tokens)
    first, second = joined.tool_calls or ()
    assert first == CallPart(index=0, id="a", name="f", arguments='{"x": 1}')
    assert second == parts[-1]
