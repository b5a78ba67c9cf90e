"""The demo model's story grammar, and the shipped model's size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from story_grammar import Story, stories
from story_plots import PLOTS
from story_world import ALLIES, KINDS, PAYLOADS, PLACES

ROOT = Path(__file__).parents[2]
ASSET = ROOT / "llorch_worker" / "assets" / "demo.gguf"
ASSET_LIMIT_BYTES = 4 * 1024 * 1024


@pytest.fixture(scope="module")
def thousand() -> list[Story]:
    return stories(seed=7, count=1000)


def test_the_same_seed_tells_the_same_stories() -> None:
    assert stories(seed=3, count=20) == stories(seed=3, count=20)
    assert stories(seed=3, count=20) != stories(seed=4, count=20)


def test_a_thousand_stories_are_all_distinct(thousand: list[Story]) -> None:
    assert len({told.text for told in thousand}) == 1000


def test_every_slot_is_filled(thousand: list[Story]) -> None:
    assert not [told.text for told in thousand if re.search(r"[{}\[\]|;]", told.text)]


def test_articles_fit_the_next_word(thousand: list[Story]) -> None:
    text = "\n".join(told.text for told in thousand)
    assert not re.findall(r"\b[Aa] [aeiouAEIOU]\w*", text)
    assert set(re.findall(r"\b[Aa]n ([^aeiouAEIOU\W]\w*)", text)) <= {"hour"}


def test_the_tables_refer_only_to_what_exists() -> None:
    for place in PLACES.values():
        assert set(place.allies) <= set(ALLIES)
    for kind in KINDS:
        assert set(kind.places) <= set(PLACES)
        for key in kind.plots:
            plot, payload = key.split(":")
            assert plot in PLOTS
            assert (payload in PAYLOADS[plot]) if PAYLOADS[plot] else payload == ""


def test_the_shipped_model_stays_small() -> None:
    assert 0 < ASSET.stat().st_size <= ASSET_LIMIT_BYTES
