"""What recent texts of a tenant say next, within their bytes."""

from __future__ import annotations

import random

import pytest

from llorch_worker.engine.drafting.recent_texts import TOKEN_BYTES, RecentLookup, RecentTexts


def guess(texts: RecentTexts, tenant: str | None, token_ids: list[int], most: int = 4) -> list[int]:
    draft = RecentLookup(texts, tenant).propose(token_ids, most)
    return [] if draft is None else draft.token_ids


def keep(texts: RecentTexts, tenant: str | None, token_ids: list[int]) -> None:
    RecentLookup(texts, tenant).end(token_ids)


def test_a_text_goes_on_as_an_earlier_one_and_ends_with_it() -> None:
    texts = RecentTexts(10_000)
    keep(texts, None, [1, 2, 3, 4, 5, 6])
    keep(texts, None, [7, 8, 9])
    assert guess(texts, None, [40, 1, 2, 3]) == [4, 5, 6]
    assert guess(texts, None, [40, 1, 2, 3], most=2) == [4, 5]
    assert guess(texts, None, [4, 5, 6]) == [], "the next text is no continuation"
    assert guess(texts, None, [2, 3]) == []


def test_the_latest_text_wins() -> None:
    texts = RecentTexts(10_000)
    keep(texts, "a", [1, 2, 3, 4])
    keep(texts, "a", [1, 2, 3, 5])
    assert guess(texts, "a", [1, 2, 3]) == [5]


def test_no_tenant_sees_anothers_text() -> None:
    texts = RecentTexts(10_000)
    keep(texts, "a", [1, 2, 3, 4])
    assert guess(texts, "a", [1, 2, 3]) == [4]
    for other in ("b", None, "", "A"):
        assert guess(texts, other, [1, 2, 3]) == []


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
    assert guess(texts, "a", kept[0][:3]) == [], "the oldest is gone"
    assert guess(texts, "a", kept[-1][:3]) == kept[-1][3:7]
    whole = [text for text in kept if guess(texts, "a", text[:4]) == text[4:]]
    room = most_bytes // TOKEN_BYTES // 9
    assert room / 4 < len(whole) <= room


def test_a_text_longer_than_all_keeps_its_end() -> None:
    texts = RecentTexts(TOKEN_BYTES * 20)
    keep(texts, "a", list(range(100)))
    assert guess(texts, "a", [95, 96, 97]) == [98, 99]
    assert guess(texts, "a", [1, 2, 3]) == []


def test_a_place_that_is_overwritten_ends_the_draft() -> None:
    texts = RecentTexts(TOKEN_BYTES * 20)
    keep(texts, "a", list(range(10)))
    lookup = RecentLookup(texts, "a")
    assert lookup.propose([0, 1, 2], 9) is not None
    keep(texts, "b", list(range(50, 68)))
    assert lookup.propose([0, 1, 2, 3], 9) is None
