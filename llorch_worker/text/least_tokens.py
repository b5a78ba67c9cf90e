"""The fewest tokens that a text can have, without tokenising it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

_PIECE_BYTES = 65_536
"""Counted in 2 ms, for which other threads wait."""


class TooManyTokens(Exception):
    """A text has ``at_least`` so many tokens, more than the caller can use."""

    def __init__(self, at_least: int) -> None:
        super().__init__(at_least)
        self.at_least = at_least


class LeastTokens:
    """Of a vocabulary that puts some bytes of any text into exactly one token each.

    Such a byte counts 1/n of a token, where n is the length of the longest token that has it. So no
    token counts more than 1, and a text has at least as many tokens as its bytes count.
    """

    def __init__(
        self, token_bytes: Iterable[bytes], spellings: Iterable[str], kept: Iterable[int]
    ) -> None:
        """``spellings`` of the tokens that ``token_bytes`` has no bytes for; the ``kept`` bytes."""
        of_length: dict[int, set[int]] = defaultdict(set)
        for token in chain(token_bytes, (s.encode(errors="surrogateescape") for s in spellings)):
            of_length[len(token)].update(token)
        longest = {byte: length for length in sorted(of_length) for byte in of_length[length]}
        self._shares = {byte: 1 / longest[byte] for byte in kept if byte in longest}

    def check(self, text: str, at_most: int) -> None:
        """Raises TooManyTokens if ``text`` has certainly more than ``at_most``."""
        data = text.encode(errors="ignore")  # half a character counts nothing
        if len(data) <= at_most:
            return
        found = 0.0
        for start in range(0, len(data), _PIECE_BYTES):
            counts = Counter(data[start : start + _PIECE_BYTES])
            found += sum(self._shares.get(byte, 0) * count for byte, count in counts.items())
            if found > at_most + 1:  # more than the sums are inexact
                raise TooManyTokens(int(found))
