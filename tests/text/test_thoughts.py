from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.text import ThoughtSplitter
from llorch_worker.text.thoughts import MISTRAL_THINK, THINK, tags_of

PARTS = ["<think>", "</think>", "<", "think>", "</thi", "nk>", " ", "\n\n", "a", "é", "<b>"]


def split(pieces: Iterable[str], *, open: bool = False) -> tuple[str, str]:
    splitter = ThoughtSplitter(open=open)
    found = [splitter.push(piece) for piece in pieces]
    found.append(splitter.flush())
    return "".join(thought for thought, _ in found), "".join(text for _, text in found)


@pytest.mark.parametrize(
    ("answer", "open", "thought", "text"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes. </think>", False, "Hm.", "Yes. </think>"),
        ("Hm.\n</think>\n\nYes.\n", True, "Hm.", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes. <think>Hm.</think>", False, "", "Yes. <think>Hm.</think>"),
        ("<think> and on", False, "and on", ""),
        ("and on </thi", True, "and on </thi", ""),
        ("  <thinks", False, "", "  <thinks"),
        ("  <thi", False, "", "  <thi"),
        ("", True, "", ""),
    ],
)
def test_a_thought_is_what_an_answer_begins_with(
    answer: str, open: bool, thought: str, text: str
) -> None:
    assert split([answer], open=open) == (thought, text)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.sampled_from(PARTS) | st.text(max_size=3)), open=st.booleans())
def test_it_does_not_matter_where_an_answer_is_cut(pieces: list[str], open: bool) -> None:
    whole = "".join(pieces)
    assert split(pieces, open=open) == split([whole], open=open) == split(whole, open=open)
    tagged = whole if open else whole.lstrip().removeprefix("<think>")
    if not open and tagged == whole.lstrip():
        assert split(pieces) == ("", whole)
    else:
        thought, _, text = tagged.partition("</think>")
        assert split(pieces, open=open) == (thought.strip(), text.lstrip())


def test_nothing_of_a_tag_is_shown_before_it_is_decided() -> None:
    splitter = ThoughtSplitter(open=False)
    shown = [splitter.push(letter) for letter in "<think>ab c</think>d"]
    assert [part for part in shown if any(part)] == [("a", ""), ("b", ""), (" c", ""), ("", "d")]
    assert not splitter.thinking
    assert re.sub("[^<]", "", "".join(thought + text for thought, text in shown)) == ""


def test_each_template_has_its_own_tags() -> None:
    assert tags_of("{{ '<think>' }}{{ '</think>' }}") is THINK
    assert tags_of("[THINK] [/THINK]") is MISTRAL_THINK
    assert tags_of("{{ messages }}") is None
    splitter = ThoughtSplitter(open=False, tags=MISTRAL_THINK)
    assert splitter.push("[THINK]<think>Hm.[/THINK]Yes.") == ("<think>Hm.", "Yes.")
