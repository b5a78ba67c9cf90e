"""Where a text is likely to go on, from what it has said before."""

from __future__ import annotations

import random

from llorch_worker.engine.drafting.prompt_lookup import PromptLookup


def test_a_repeated_beginning_goes_on_as_before() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_a_new_text_has_no_draft() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5], 3) == []
    assert PromptLookup().propose([1], 3) == []


def test_a_period_goes_on_as_often_as_asked() -> None:
    assert PromptLookup().propose([8, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert PromptLookup().propose([7, 7, 7], 4) == [7, 7, 7, 7]


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert PromptLookup().propose([5, 1, 2, 70, 6, 1, 2, 80, 5, 1, 2], 1) == [70]
    assert PromptLookup().propose([1, 2, 70, 3, 1, 2, 80, 4, 1, 2], 1) == [80]


def test_it_stays_where_the_text_goes_on() -> None:
    """A later place with as long a match does not draw it away."""
    lookup = PromptLookup()
    text = [1, 2, 3, 4, 5, 6, 0, 3, 4, 9, 0, 1, 2]
    assert lookup.propose(text, 2) == [3, 4]
    assert lookup.propose([*text, 3, 4], 2) == [5, 6]
    assert lookup.propose([*text, 3, 4, 8], 2) == [], "the text has left it"


def test_ids_are_found_as_a_whole() -> None:
    """Bytes of two neighbours may look like a third id."""
    one, shifted = 0x01020304, 0x02030401
    assert PromptLookup().propose([one] * 3 + [9, shifted, shifted], 1) == []


def test_growing_and_whole_texts_end_at_a_place_of_the_same_tokens() -> None:
    chance = random.Random(1)
    for _ in range(50):
        text = [chance.randrange(4) for _ in range(60)]
        growing = PromptLookup()
        for size in range(1, len(text)):
            draft = growing.propose(text[:size], 1)
            if draft:
                pairs = [tuple(text[i : i + 3]) for i in range(size - 2)]
                assert (*text[size - 2 : size], draft[0]) in pairs or text[size - 1] == draft[0]
