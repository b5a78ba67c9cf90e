from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.text import ThoughtSplitter
from llorch_worker.text.thoughts import (
    GRANITE_THINK,
    GRANITE_WORDS,
    MISTRAL_THINK,
    THINK,
    Tags,
    begun,
    tags_of,
)

PARTS = [
    "<think>",
    "</think>",
    "<response>",
    "</response>",
    "<resp",
    "</r",
    "<",
    "think>",
    "</thi",
    "nk>",
    " ",
    "\n\n",
    "a",
    "é",
    "<b>",
]


def split(
    pieces: Iterable[str], *, open: bool = False, tags: Tags = THINK, said: str = ""
) -> tuple[str, str]:
    splitter = ThoughtSplitter(open=open, tags=tags, said=said)
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


@pytest.mark.parametrize(
    ("answer", "open", "thought", "text"),
    [
        ("<think>Hm.</think>\n<response> Yes.\n</response>", False, "Hm.", "Yes."),
        ("Hm.</think><response>Yes.</response>", True, "Hm.", "Yes."),
        ("<response>\nYes.</response>", False, "", "Yes."),
        ("<think>Hm.</think>Yes. <response>", False, "Hm.", "Yes. <response>"),
        ("<think>Hm.</think> <resp", False, "Hm.", "<resp"),
        ("<think>Hm.</think><response>Yes. </res", False, "Hm.", "Yes. </res"),
        ("<think><response></think><response></think></response>", False, "<response>", "</think>"),
        ("Yes. </response>", False, "", "Yes. </response>"),
    ],
)
def test_the_text_has_no_tags_where_a_template_has_some_for_it(
    answer: str, open: bool, thought: str, text: str
) -> None:
    assert split([answer], open=open, tags=GRANITE_THINK) == (thought, text)
    assert split(answer, open=open, tags=GRANITE_THINK) == (thought, text)


def test_words_may_be_the_tags() -> None:
    answer = "Here is my thought process:\nHm.\n\nHere is my response:\n\nYes."
    assert (
        split([answer], tags=GRANITE_WORDS) == split(answer, tags=GRANITE_WORDS) == ("Hm.", "Yes.")
    )


@pytest.mark.parametrize(
    ("said", "answer", "thought", "text"),
    [
        ("<think>", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\nHm", ", hm.\n</think>\n\nYes.", ", hm.", "Yes."),
        ("<think>\nHm,", " hm.</think>Yes.", " hm.", "Yes."),
        ("<think>\nHm, ", "hm.</think>Yes.", "hm.", "Yes."),
        ("<think>Hm.</thi", "nk>Yes.", "", "Yes."),
        ("<think>Hm.</thi", "s> and on</think>Yes.", "s> and on", "Yes."),
        ("<thi", "nk>Hm.</think>Yes.", "Hm.", "Yes."),
        ("<thi", "s is it", "", "s is it"),
        ("<think>Hm.</think>", "\n\nYes.", "", "Yes."),
        ("<think>Hm.</think>\n\nYes", ", it is.", "", ", it is."),
        ("Yes", " <think>, it is.</think>", "", " <think>, it is.</think>"),
        ("  ", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(
    said: str, answer: str, thought: str, text: str
) -> None:
    assert split([answer], said=said) == split(answer, said=said) == (thought, text)


@settings(max_examples=300, deadline=None)
@given(
    said=st.lists(st.sampled_from(PARTS) | st.text(max_size=3)).map("".join),
    pieces=st.lists(st.sampled_from(PARTS) | st.text(max_size=3)),
    open=st.booleans(),
    tags=st.sampled_from([THINK, GRANITE_THINK]),
)
def test_what_is_said_and_what_goes_on_are_the_whole(
    said: str, pieces: list[str], open: bool, tags: Tags
) -> None:
    whole = "".join(pieces)
    rest = split(pieces, open=open, tags=tags, said=said)
    assert rest == split([whole], open=open, tags=tags, said=said)
    if not any(begun(said, tag) for tag in tags.spellings()):
        before, both = (split([part], open=open, tags=tags) for part in (said, said + whole))
        for each in range(2):
            assert "".join((before[each] + rest[each]).split()) == "".join(both[each].split())


def test_nothing_of_a_tag_is_shown_before_it_is_decided() -> None:
    splitter = ThoughtSplitter(open=False)
    shown = [splitter.push(letter) for letter in "<think>ab c</think>d"]
    assert [part for part in shown if any(part)] == [("a", ""), ("b", ""), (" c", ""), ("", "d")]
    assert not splitter.thinking
    assert re.sub("[^<]", "", "".join(thought + text for thought, text in shown)) == ""


def test_each_template_has_its_own_tags() -> None:
    assert tags_of("{{ '<think>' }}{{ '</think>' }}") is THINK
    assert tags_of("[THINK] [/THINK]") is MISTRAL_THINK
    assert tags_of("<think></think> and <response></response>") is GRANITE_THINK
    assert tags_of("{{ messages }}") is None
    splitter = ThoughtSplitter(open=False, tags=MISTRAL_THINK)
    assert splitter.push("[THINK]<think>Hm.[/THINK]Yes.") == ("<think>Hm.", "Yes.")
