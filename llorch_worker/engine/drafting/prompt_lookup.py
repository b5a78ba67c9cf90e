"""Drafts from the sequence's own prompt and text."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from struct import pack
from typing import Final

from llorch_worker.engine.drafting.drafter import Acceptance, Draft, Drafter

ID_BYTES: Final = 4
NEEDLE_TOKENS: Final = 2
"""How many of the last tokens an earlier place must share to be found."""
MOST_PLACES: Final = 16
"""How many of the latest such places are compared."""
MOST_SEARCHED: Final = 32_768
"""Among how many of the last tokens they are looked for."""
LONGEST_MATCH: Final = 32
"""Tokens up to which places are compared; a longer match is no better."""
_BORDER: Final = -1
"""Between the prediction and the prompt. No token."""


class PromptLookup(Drafter):
    """Goes on where the last tokens stood before, as in prompt lookup decoding (Saxena 2023).

    While the text repeats what follows an earlier place, it stays at that place. It looks for
    another only when a token differs, at the place with the longest match, the latest of equals.
    """

    def __init__(self, prediction: Ids[int] = ()) -> None:
        """``prediction``: what the text may say. It is read as if it stood before the prompt."""
        self._ids = [*prediction, _BORDER] if prediction else []
        self._before = len(self._ids)
        # A few calls of rfind find the latest places; an index in Python would cost each token of a
        # prompt more than they cost each step.
        self._bytes = bytearray(_packed(self._ids))
        self._next: int | None = None
        """The place in ``_ids`` whose token is expected next."""
        self._matched = 0
        """How many tokens before that place the text has repeated."""
        self._acceptance = Acceptance()

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``."""
        self._follow(token_ids[len(self._ids) - self._before :])
        if self._next is None:
            return None
        draft = self._ids[self._next : self._next + most]
        # A text that repeats itself goes on with what the draft has just repeated.
        period = len(self._ids) - self._next
        while len(draft) < most:
            draft.append(draft[len(draft) - period])
        if _BORDER in draft:
            del draft[draft.index(_BORDER) :]
        if not draft:
            return None
        return Draft(draft, self._acceptance.chances(self._matched, len(draft)))

    def _follow(self, fresh: list[int]) -> None:
        self._ids += fresh
        self._bytes += _packed(fresh)
        for token_id in fresh:
            if self._next is not None:
                held = self._ids[self._next] == token_id
                self._acceptance.note(self._matched, held)
                if held:
                    self._next += 1
                    self._matched += 1
                    continue
            self._next, self._matched = self._search(self._ids)
            return

    def _search(self, token_ids: list[int]) -> tuple[int | None, int]:
        """The place after the longest earlier match of the last tokens, and the match's length."""
        size = len(token_ids)
        needle = bytes(self._bytes[-NEEDLE_TOKENS * ID_BYTES :])
        best, longest = None, 0
        # Overlapping places count: "a a a" goes on with "a".
        end = len(self._bytes) - 1
        begin = max(0, len(self._bytes) - MOST_SEARCHED * ID_BYTES)
        for _ in range(MOST_PLACES):
            at = self._bytes.rfind(needle, begin, end)
            if at < 0 or size <= NEEDLE_TOKENS:
                break
            end = at + len(needle) - 1
            if at % ID_BYTES:
                continue
            place = at // ID_BYTES + NEEDLE_TOKENS
            length = NEEDLE_TOKENS
            while (
                length < min(place, LONGEST_MATCH)
                and token_ids[place - length - 1] == token_ids[size - length - 1]
            ):
                length += 1
            if length > longest:
                best, longest = place, length
        return best, longest


def _packed(token_ids: list[int]) -> bytes:
    return pack(f"<{len(token_ids)}i", *token_ids)
