"""The demo model's story grammar, and the shipped model's size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from story_grammar import Story, stories, with_articles
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


def test_every_plot_occurs(thousand: list[Story]) -> None:
    assert {told.plot for told in thousand} == set(PLOTS)


def test_no_opening_sentence_is_common(thousand: list[Story]) -> None:
    first = [re.split(r"(?<=[.!?]) ", told.text)[0] for told in thousand]
    assert max(first.count(sentence) for sentence in set(first)) <= 20


def test_the_stories_know_many_hundred_words(thousand: list[Story]) -> None:
    words = {w.lower() for told in thousand for w in re.findall(r"[A-Za-z]+", told.text)}
    assert len(words) > 800


def test_every_slot_is_filled(thousand: list[Story]) -> None:
    assert not [told.text for told in thousand if re.search(r"[{}\[\]|;]", told.text)]


def test_articles_fit_the_next_word(thousand: list[Story]) -> None:
    text = "\n".join(told.text for told in thousand)
    assert not re.findall(r"\b[Aa] [aeiouAEIOU]\w*", text)
    assert set(re.findall(r"\b[Aa]n ([^aeiouAEIOU\W]\w*)", text)) <= {"hour"}


@pytest.mark.parametrize(
    ("raw", "written"),
    [("a owl", "an owl"), ("A old bat", "An old bat"), ("a one-eyed cat", "a one-eyed cat")],
)
def test_articles_follow_the_sound(raw: str, written: str) -> None:
    assert with_articles(raw) == written


def test_sentences_start_upper_case_and_end_with_a_stop(thousand: list[Story]) -> None:
    for told in thousand:
        for paragraph in told.text.split("\n\n"):
            assert re.match(r'"?[A-Z]', paragraph), paragraph
            assert re.search(r'[.!?]"?$', paragraph), paragraph
            assert "  " not in paragraph
            assert not re.search(r"[.!?] [a-z]", paragraph), paragraph


def test_quotes_are_closed_in_every_paragraph(thousand: list[Story]) -> None:
    for told in thousand:
        assert all(p.count('"') % 2 == 0 for p in told.text.split("\n\n"))


def test_every_story_fits_a_training_window(thousand: list[Story]) -> None:
    lengths = [len(re.findall(r"\w+|[^\w\s]", told.text)) for told in thousand]
    assert min(lengths) >= 60
    assert max(lengths) <= 220


def test_a_helper_is_never_of_the_main_characters_kind() -> None:
    for kind in KINDS:
        for place in kind.places:
            assert set(PLACES[place].allies) - {kind.noun}


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
