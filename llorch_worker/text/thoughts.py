"""The thought that an answer may begin with, such as between ``<think>`` and ``</think>``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class Tags:
    """What stands around a thought. They may be control tokens."""

    opening: str
    closing: str


THINK = Tags("<think>", "</think>")
MISTRAL_THINK = Tags("[THINK]", "[/THINK]")
ALL_TAGS = (THINK, MISTRAL_THINK)


def tags_of(template: str | None) -> Tags | None:
    """Those that a chat template knows."""
    return next((t for t in ALL_TAGS if t.closing in (template or "")), None)


class _Place(Enum):
    START = auto()
    """Only white space, or the beginning of the opening tag."""
    THOUGHT = auto()
    BEHIND = auto()
    """Only white space since the thought."""
    TEXT = auto()


class ThoughtSplitter:
    """Splits an answer into its thought and its text while it comes, wherever tags are cut.

    Neither part has the white space at the tags. ``open``: the prompt ends within a thought.
    """

    def __init__(self, *, open: bool, tags: Tags = THINK) -> None:
        self._tags = tags
        self._place = _Place.THOUGHT if open else _Place.START
        self._held = ""
        self._thought_begun = False

    @property
    def thinking(self) -> bool:
        return self._place is _Place.THOUGHT

    def push(self, text: str) -> tuple[str, str]:
        """What of the thought and of the text ``text`` completes."""
        self._held += text
        thought = ""
        if self._place is _Place.START:
            start = self._held.lstrip()
            if start.startswith(self._tags.opening):
                self._place, self._held = _Place.THOUGHT, start.removeprefix(self._tags.opening)
            elif not self._tags.opening.startswith(start):
                self._place = _Place.TEXT
        if self._place is _Place.THOUGHT:
            thought, closing, behind = self._held.partition(self._tags.closing)
            if closing:
                self._place, self._held = _Place.BEHIND, behind
                thought = thought.rstrip()
            else:
                shown = len(thought) - begun(thought, self._tags.closing)
                shown = len(thought[:shown].rstrip())
                thought, self._held = thought[:shown], thought[shown:]
            thought = thought if self._thought_begun else thought.lstrip()
            self._thought_begun = self._thought_begun or bool(thought)
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.TEXT
        if self._place is not _Place.TEXT:
            return thought, ""
        shown_text, self._held = self._held, ""
        return thought, shown_text

    def flush(self) -> tuple[str, str]:
        """What is held back, because the answer ends."""
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            return held.rstrip() if self._thought_begun else held.strip(), ""
        return "", held


def begun(text: str, tag: str) -> int:
    """How many of the last characters may begin the tag."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)
