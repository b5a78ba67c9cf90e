"""The thought that an answer may begin with, such as between ``<think>`` and ``</think>``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class Tags:
    """What stands around a thought, and what may stand around the text behind it. They may be
    control tokens."""

    opening: str
    closing: str
    text_opening: str = ""
    text_closing: str = ""

    def spellings(self) -> tuple[str, ...]:
        every = (self.opening, self.closing, self.text_opening, self.text_closing)
        return tuple(filter(None, every))


THINK = Tags("<think>", "</think>")
MISTRAL_THINK = Tags("[THINK]", "[/THINK]")
GRANITE_THINK = Tags("<think>", "</think>", "<response>", "</response>")
"""Granite 3.3's."""
GRANITE_WORDS = Tags("Here is my thought process:", "Here is my response:")
"""Granite 3.2's."""
ALL_TAGS = (GRANITE_THINK, THINK, MISTRAL_THINK, GRANITE_WORDS)


def tags_of(template: str | None) -> Tags | None:
    """Those that a chat template knows: it may name only those that end something."""
    shown = template or ""
    return next((t for t in ALL_TAGS if t.closing in shown and t.text_closing in shown), None)


class _Place(Enum):
    START = auto()
    """Only white space, or the beginning of a tag."""
    THOUGHT = auto()
    BEHIND = auto()
    """Only white space, or the beginning of a tag, since the thought."""
    TAGGED = auto()
    """Text between its tags."""
    TEXT = auto()


class ThoughtSplitter:
    """Splits an answer into its thought and its text while it comes, wherever tags are cut.

    Neither part has the white space at the tags. ``open``: the prompt ends within a thought, or
    would without ``said``, the beginning of the answer that the prompt ends with.
    """

    def __init__(self, *, open: bool, tags: Tags = THINK, said: str = "") -> None:
        self._tags = tags
        self._place = _Place.THOUGHT if open else _Place.START
        self._held = ""
        self._begun = False
        """Whether anything of the thought, or of the text between its tags, has come."""
        self._said = 0
        """How many of the first characters held are the prompt's."""
        self.push(said)
        if not self._begun:
            self._held = self._held.lstrip()
        self._said = len(self._held)

    @property
    def thinking(self) -> bool:
        return self._place is _Place.THOUGHT

    def push(self, text: str) -> tuple[str, str]:
        """What of the thought and of the text ``text`` completes."""
        self._held += text
        thought = shown = ""
        if self._place is _Place.START:
            tags, start = self._tags, self._held.lstrip()
            if not self._opened(tags.opening, _Place.THOUGHT):
                self._opened(tags.text_opening, _Place.TAGGED)
            if self._place is _Place.START and not _may_be(start, tags.opening, tags.text_opening):
                self._place = _Place.TEXT
        if self._place is _Place.THOUGHT:
            thought, ended = self._until(self._tags.closing)
            if ended:
                self._place = _Place.BEHIND
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            if not self._opened(self._tags.text_opening, _Place.TAGGED) and not _may_be(
                self._held, self._tags.text_opening
            ):
                self._place = _Place.TEXT
        if self._place is _Place.TAGGED:
            shown, ended = self._until(self._tags.text_closing)
            if ended:
                self._place = _Place.TEXT
        if self._place is _Place.TEXT:
            shown += self._released(len(self._held))
        return thought, shown

    def flush(self) -> tuple[str, str]:
        """What is held back, because the answer ends."""
        place, held = self._place, self._released(len(self._held))
        if place is _Place.THOUGHT:
            return held.rstrip() if self._begun else held.strip(), ""
        return "", held.lstrip() if place is _Place.TAGGED and not self._begun else held

    def _opened(self, tag: str, place: _Place) -> bool:
        """Whether the tag is there, behind which ``place`` begins."""
        start = self._held.lstrip()
        if not tag or not start.startswith(tag):
            return False
        self._place, self._held = place, start.removeprefix(tag)
        self._said, self._begun = 0, False
        return True

    def _until(self, tag: str) -> tuple[str, bool]:
        """What stands before the closing tag, and whether that is there."""
        text, closing, rest = self._held.partition(tag)
        shown = len(text) if closing else len(text) - begun(text, tag)
        text = self._released(len(text[:shown].rstrip()))
        if closing:
            self._held, self._said = rest, 0
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return text, bool(closing)

    def _released(self, chars: int) -> str:
        """The first ``chars`` of what is held, but for those of the prompt."""
        text, self._held = self._held[:chars], self._held[chars:]
        said, self._said = (self._said, 0) if chars else (0, self._said)
        return text[said:]


def _may_be(start: str, *tags: str) -> bool:
    """Whether more text may make it one of the tags, or it is white space."""
    return not start.strip() or any(tag.startswith(start) for tag in tags)


def begun(text: str, tag: str) -> int:
    """How many of the last characters may begin the tag."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)
