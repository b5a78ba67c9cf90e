"""Where a text is likely to go on, from what it has said before and recent texts of its tenant."""

from __future__ import annotations

import random

import pytest

from llorch_worker.engine.drafter import (
    MOST_SEARCHED,
    TOKEN_BYTES,
    PromptLookup,
    RecentLookup,
    RecentTexts,
)


def guess(lookup: PromptLookup, token_ids: list[int], most: int) -> list[int]:
    draft = lookup.propose(token_ids, most)
    return [] if draft is None else draft.token_ids


def test_a_repeated_beginning_goes_on_as_before() -> None:
    assert guess(PromptLookup(), [1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_a_new_text_has_no_draft() -> None:
    assert guess(PromptLookup(), [1, 2, 3, 4, 5], 3) == []
    assert guess(PromptLookup(), [1], 3) == []


def test_a_period_goes_on_as_often_as_asked() -> None:
    assert guess(PromptLookup(), [8, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert guess(PromptLookup(), [7, 7, 7], 4) == [7, 7, 7, 7]


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert guess(PromptLookup(), [5, 1, 2, 70, 6, 1, 2, 80, 5, 1, 2], 1) == [70]
    assert guess(PromptLookup(), [1, 2, 70, 3, 1, 2, 80, 4, 1, 2], 1) == [80]


def test_it_stays_where_the_text_goes_on() -> None:
    """A later place with as long a match does not draw it away."""
    lookup = PromptLookup()
    text = [1, 2, 3, 4, 5, 6, 0, 3, 4, 9, 0, 1, 2]
    assert guess(lookup, text, 2) == [3, 4]
    assert guess(lookup, [*text, 3, 4], 2) == [5, 6]
    assert guess(lookup, [*text, 3, 4, 8], 2) == [], "the text has left it"


def test_ids_are_found_as_a_whole() -> None:
    """Bytes of two neighbours may look like a third id."""
    one, shifted = 0x01020304, 0x02030401
    assert guess(PromptLookup(), [one] * 3 + [9, shifted, shifted], 1) == []


def test_growing_and_whole_texts_end_at_a_place_of_the_same_tokens() -> None:
    chance = random.Random(1)
    for _ in range(50):
        text = [chance.randrange(4) for _ in range(60)]
        growing = PromptLookup()
        for size in range(1, len(text)):
            draft = guess(growing, text[:size], 1)
            if draft:
                threes = [tuple(text[i : i + 3]) for i in range(size - 2)]
                assert (*text[size - 2 : size], draft[0]) in threes


def test_a_long_repetition_is_trusted_more_than_a_short_one() -> None:
    short = PromptLookup().propose([1, 2, 3, 4, 9, 1, 2], 3)
    long = PromptLookup().propose([*range(40), 99, *range(30)], 3)
    assert short is not None
    assert long is not None
    assert short.chances[0] > short.chances[1] > short.chances[2] > 0
    assert all(a < b for a, b in zip(short.chances, long.chances, strict=True))


def test_guesses_that_fail_are_trusted_less_and_those_that_hold_again_more() -> None:
    chance = random.Random(1)
    text = [1, 2]
    lookup = PromptLookup()

    def last_chance() -> float:
        text.extend((1, 2))
        draft = lookup.propose(text, 1)
        assert draft is not None
        return draft.chances[0]

    before = last_chance()
    for _ in range(20):
        text.append(chance.randrange(100, 10_000))
        lookup.propose(text, 1)
        failed = last_chance()
    for _ in range(20):
        text.append(50)
        lookup.propose(text, 1)
        held = last_chance()
    assert failed < before / 3
    assert held > 2 * failed


def test_a_prediction_is_read_before_the_prompt_and_not_beyond_its_end() -> None:
    lookup = PromptLookup([5, 6, 7, 8])
    assert guess(lookup, [1, 2, 5, 6], 4) == [7, 8]
    assert guess(lookup, [1, 2, 5, 6, 7, 8], 4) == [], "nothing follows it"
    assert guess(lookup, [1, 2, 5, 6, 7, 8, 1, 2], 4) == [5, 6, 7, 8]


def test_only_the_latest_part_of_a_long_text_is_searched() -> None:
    text = [1, 2, 3, *range(10, MOST_SEARCHED + 5), 1, 2]
    assert guess(PromptLookup(), text, 1) == [3]
    assert guess(PromptLookup(), [*text[:-2], 4, 1, 2], 1) == []


def recent(
    texts: RecentTexts, tenant: str | None, token_ids: list[int], most: int = 4
) -> list[int]:
    draft = RecentLookup(texts, tenant).propose(token_ids, most)
    return [] if draft is None else draft.token_ids


def keep(texts: RecentTexts, tenant: str | None, token_ids: list[int]) -> None:
    RecentLookup(texts, tenant).end(token_ids)


def test_a_text_goes_on_as_an_earlier_one_and_ends_with_it() -> None:
    texts = RecentTexts(10_000)
    keep(texts, None, [1, 2, 3, 4, 5, 6])
    keep(texts, None, [7, 8, 9])
    assert recent(texts, None, [40, 1, 2, 3]) == [4, 5, 6]
    assert recent(texts, None, [40, 1, 2, 3], most=2) == [4, 5]
    assert recent(texts, None, [4, 5, 6]) == [], "the next text is no continuation"
    assert recent(texts, None, [2, 3]) == []


def test_the_latest_text_wins() -> None:
    texts = RecentTexts(10_000)
    keep(texts, "a", [1, 2, 3, 4])
    keep(texts, "a", [1, 2, 3, 5])
    assert recent(texts, "a", [1, 2, 3]) == [5]


def test_no_tenant_sees_anothers_text() -> None:
    texts = RecentTexts(10_000)
    keep(texts, "a", [1, 2, 3, 4])
    assert recent(texts, "a", [1, 2, 3]) == [4]
    for other in ("b", None, "", "A"):
        assert recent(texts, other, [1, 2, 3]) == []


@pytest.mark.parametrize("most_bytes", [10_000, 100_000])
def test_the_bytes_are_bounded_and_the_oldest_go(most_bytes: int) -> None:
    texts = RecentTexts(most_bytes)
    texts._key = bytes(16)  # which places collide depends on it
    assert texts.nbytes <= most_bytes
    chance = random.Random(1)
    kept = [[chance.randrange(50_000) for _ in range(8)] for _ in range(most_bytes // 80)]
    for text in kept:
        keep(texts, "a", text)
    assert texts.nbytes <= most_bytes
    assert recent(texts, "a", kept[0][:3]) == [], "the oldest is gone"
    assert recent(texts, "a", kept[-1][:3]) == kept[-1][3:7]
    whole = [text for text in kept if recent(texts, "a", text[:4]) == text[4:]]
    room = most_bytes // TOKEN_BYTES // 9
    assert room / 4 < len(whole) <= room


def test_a_text_longer_than_all_keeps_its_end() -> None:
    texts = RecentTexts(TOKEN_BYTES * 20)
    keep(texts, "a", list(range(100)))
    assert recent(texts, "a", [95, 96, 97]) == [98, 99]
    assert recent(texts, "a", [1, 2, 3]) == []


def test_a_place_that_is_overwritten_ends_the_draft() -> None:
    texts = RecentTexts(TOKEN_BYTES * 20)
    keep(texts, "a", list(range(10)))
    lookup = RecentLookup(texts, "a")
    assert lookup.propose([0, 1, 2], 9) is not None
    keep(texts, "b", list(range(50, 68)))
    assert lookup.propose([0, 1, 2, 3], 9) is None
