"""What guesses the next tokens of one text, and how likely its guesses hold."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes
from struct import pack
from typing import Any, Final

import numpy as np

from llorch_worker.engine_options import EngineOptions

PROMPT_NEEDLE_TOKENS: Final = 2
"""How many of the last tokens an earlier place of the text must share to be found."""
MOST_PLACES: Final = 16
"""How many of the latest such places are compared."""
MOST_SEARCHED: Final = 32_768
"""Among how many of the last tokens they are looked for."""
RECENT_NEEDLE_TOKENS: Final = 3
"""How many of the last tokens a recent text must share to be found."""
LONGEST_MATCH: Final = 32
"""Tokens up to which places are compared; a longer match is no better."""
ID_BYTES: Final = 4
TOKEN_BYTES: Final = ID_BYTES + 8 + 8
"""Of a recent text: an id, whose text it is, and a place in the index."""
_BORDER: Final = -1
"""Between two texts. No token."""
_MASK: Final = 2**64 - 1
_FACTOR: Final = 0x9E3779B97F4A7C15

PRIORS: Final = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.95)
"""By the class of the match. Of a place that shares the last 2 or 3 tokens, two in five hold; of
one that shares 32 and more, nearly all."""
RATE: Final = 1 / 8
"""How much the newest token counts."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, at least one. ``chances[i]`` estimates how likely ``token_ids[i]``
    and all before it come."""

    token_ids: list[int]
    chances: list[float]


class Drafter:
    """Belongs to one sequence. A wrong guess costs time, never a token: the engine keeps a draft
    token only if it is the one that it chooses itself."""

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """Up to ``most`` tokens that may follow ``token_ids``, which only grow between calls."""
        raise NotImplementedError

    def end(self, generated_ids: list[int]) -> None:
        """The text has ended, with these tokens."""


DrafterMaker = Callable[[str | None, list[int]], Drafter]
"""Makes a drafter for a new sequence of a tenant, with the tokens of the request's prediction."""


def drafter_maker(options: EngineOptions) -> DrafterMaker:
    """The maker of one engine's drafters, which share its recent texts.

    The ``options`` say that there are drafts."""
    if options.drafter == "lookup":
        return lambda _, prediction: PromptLookup(prediction)
    texts = RecentTexts(options.suffix_bytes)
    return lambda tenant, prediction: BetterOf(
        PromptLookup(prediction), RecentLookup(texts, tenant)
    )


class BetterOf(Drafter):
    """Takes the draft that promises more tokens."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._drafters = (first, second)

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``."""
        drafts = (drafter.propose(token_ids, most) for drafter in self._drafters)
        return max(filter(None, drafts), key=lambda draft: sum(draft.chances), default=None)

    def end(self, generated_ids: list[int]) -> None:
        """See ``Drafter``."""
        for drafter in self._drafters:
            drafter.end(generated_ids)


class Acceptance:
    """How likely the next token of a text is the one that follows a place which the text repeats:
    estimates for one sequence, by the length of its match with the place.

    It learns from every token that has a guess, whether the guess was computed as a draft or not.
    So it sees when guesses begin to hold again after drafts have ceased to pay.
    """

    def __init__(self) -> None:
        self._chances = list(PRIORS)

    def note(self, matched: int, held: bool) -> None:
        """A token has come whose guess followed a match of ``matched`` tokens."""
        of = _class_of(matched)
        self._chances[of] += (held - self._chances[of]) * RATE

    def chances(self, matched: int, count: int) -> list[float]:
        """For each of ``count`` guesses in a row, the chance that it and all before it hold."""
        chance, chances = 1.0, []
        for more in range(count):
            chance *= self._chances[_class_of(matched + more)]
            chances.append(chance)
        return chances


def _class_of(matched: int) -> int:
    """1, 2 to 3, 4 to 7 ... tokens."""
    return min(matched.bit_length(), len(PRIORS) - 1)


class Lookup(Drafter):
    """Goes on as some text did after the same tokens.

    While the text repeats what follows a place, the lookup stays at that place. It searches for
    another only when a token differs.
    """

    def __init__(self) -> None:
        self._known = 0
        self._next: int | None = None
        """The place whose token is expected next."""
        self._matched = 0
        """How many tokens before that place the text has repeated."""
        self._acceptance = Acceptance()

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``."""
        self._follow(token_ids)
        draft = [] if self._next is None else self._from(self._next, most)
        if not draft:
            return None
        return Draft(draft, self._acceptance.chances(self._matched, len(draft)))

    def _follow(self, token_ids: list[int]) -> None:
        fresh, self._known = token_ids[self._known :], len(token_ids)
        for token_id in fresh:
            if self._next is not None and (guess := self._at(self._next)) is not None:
                self._acceptance.note(self._matched, guess == token_id)
                if guess == token_id:
                    self._next += 1
                    self._matched += 1
                    continue
            self._next, self._matched = self._search(token_ids)
            return

    def _at(self, place: int) -> int | None:
        """The token at ``place``, if it is still there."""
        raise NotImplementedError

    def _from(self, place: int, most: int) -> list[int]:
        """Up to ``most`` tokens from ``place`` on."""
        raise NotImplementedError

    def _search(self, token_ids: list[int]) -> tuple[int | None, int]:
        """The place after the best match of the last tokens, and the match's length."""
        raise NotImplementedError


class PromptLookup(Lookup):
    """Goes on where the last tokens of the text itself stood before, as in prompt lookup decoding
    (Saxena 2023): at the place with the longest match, the latest of equals."""

    def __init__(self, prediction: Ids[int] = ()) -> None:
        """``prediction``: what the text may say. It is read as if it stood before the prompt."""
        super().__init__()
        self._ids = [*prediction, _BORDER] if prediction else []
        # A few calls of rfind find the latest places; an index in Python would cost each token of a
        # prompt more than they cost each step.
        self._bytes = bytearray(_packed(self._ids))

    def _follow(self, token_ids: list[int]) -> None:
        fresh = token_ids[self._known :]
        self._ids += fresh
        self._bytes += _packed(fresh)
        super()._follow(token_ids)

    def _at(self, place: int) -> int:
        return self._ids[place]

    def _from(self, place: int, most: int) -> list[int]:
        draft = self._ids[place : place + most]
        # A text that repeats itself goes on with what the draft has just repeated.
        period = len(self._ids) - place
        while len(draft) < most:
            draft.append(draft[len(draft) - period])
        if _BORDER in draft:
            del draft[draft.index(_BORDER) :]
        return draft

    def _search(self, token_ids: list[int]) -> tuple[int | None, int]:
        needle = bytes(self._bytes[-PROMPT_NEEDLE_TOKENS * ID_BYTES :])
        best, longest = None, 0
        # Overlapping places count: "a a a" goes on with "a".
        end = len(self._bytes) - 1
        begin = max(0, len(self._bytes) - MOST_SEARCHED * ID_BYTES)
        for _ in range(MOST_PLACES):
            at = self._bytes.rfind(needle, begin, end)
            if at < 0 or len(self._ids) <= PROMPT_NEEDLE_TOKENS:
                break
            end = at + len(needle) - 1
            if at % ID_BYTES:
                continue
            place = at // ID_BYTES + PROMPT_NEEDLE_TOKENS
            length = PROMPT_NEEDLE_TOKENS
            while (
                length < min(place, LONGEST_MATCH, len(token_ids))
                and self._ids[place - 1 - length] == token_ids[-1 - length]
            ):
                length += 1
            if length > longest:
                best, longest = place, length
        return best, longest


def _packed(token_ids: list[int]) -> bytes:
    return pack(f"<{len(token_ids)}i", *token_ids)


class RecentTexts:
    """Texts of ended sequences in a ring: the newest overwrites the oldest.

    An index has the latest place of each three tokens of each tenant. It is never cleaned up: a
    place counts only if the ring still has those tokens there, as the same tenant's.
    """

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` for all tenants, taken as texts come; at least room for 16 tokens."""
        self._size = max(16, most_bytes // TOKEN_BYTES)
        # Zeros are not touched, so the system gives them no memory yet.
        self._ids = np.zeros(self._size, np.int32)
        self._owners = np.zeros(self._size, np.uint64)
        self._bits = self._size.bit_length() - 1
        self._places = np.zeros(1 << self._bits, np.int64)
        # Tokens written since the start; a token's place is its number. 0 means none.
        self._written = 1
        self._key = token_bytes(16)

    @property
    def nbytes(self) -> int:
        """Bytes of the full ring and its index."""
        return self._ids.nbytes + self._owners.nbytes + self._places.nbytes

    def owner(self, tenant: str | None) -> int:
        """The tenant's number; jobs without a tenant share one."""
        name = b"" if tenant is None else b"=" + tenant.encode()
        return int.from_bytes(blake2b(name, digest_size=8, key=self._key).digest())

    def add(self, owner: int, token_ids: list[int]) -> None:
        """Keeps a text that has ended."""
        kept = token_ids[-(self._size - 1) :]
        ids = np.array([*kept, _BORDER], np.int32)
        places = np.arange(self._written, self._written + len(ids))
        self._ids[places % self._size] = ids
        self._owners[places % self._size] = owner
        self._written += len(ids)
        starts = len(kept) - RECENT_NEEDLE_TOKENS + 1
        if starts < 1:
            return
        a, b, c = (ids[i : starts + i].astype(np.uint64) for i in range(3))
        self._places[self._slot(owner, a, b, c)] = places[RECENT_NEEDLE_TOKENS:]

    def find(self, owner: int, token_ids: list[int]) -> tuple[int | None, int]:
        """The latest place in a text of ``owner`` after the last of ``token_ids``, and the length
        of the match before it."""
        if len(token_ids) < RECENT_NEEDLE_TOKENS:
            return None, 0
        place = int(self._places[self._slot(owner, *token_ids[-RECENT_NEEDLE_TOKENS:])])
        matched = 0
        while (
            matched < min(LONGEST_MATCH, len(token_ids))
            and self.at(owner, place - 1 - matched) == token_ids[-1 - matched]
        ):
            matched += 1
        return (place, matched) if matched >= RECENT_NEEDLE_TOKENS else (None, 0)

    def at(self, owner: int, place: int) -> int | None:
        """The token at ``place`` if a text of ``owner`` has one there."""
        index = place % self._size
        if not max(0, self._written - self._size - 1) < place < self._written:
            return None
        if int(self._owners[index]) != owner or self._ids[index] == _BORDER:
            return None
        return int(self._ids[index])

    def _slot(self, owner: int, a: Any, b: Any, c: Any) -> Any:
        """Where the index has three tokens: ints, or uint64 arrays of which it has many."""
        mixed = ((a * _FACTOR + b) * _FACTOR + c) * _FACTOR + owner
        return ((mixed * _FACTOR) & _MASK) >> (64 - self._bits)


class RecentLookup(Lookup):
    """Goes on where a recent text of the same tenant went on."""

    def __init__(self, texts: RecentTexts, tenant: str | None) -> None:
        super().__init__()
        self._texts = texts
        self._owner = texts.owner(tenant)

    def end(self, generated_ids: list[int]) -> None:
        """See ``Drafter``."""
        self._texts.add(self._owner, generated_ids)

    def _at(self, place: int) -> int | None:
        return self._texts.at(self._owner, place)

    def _from(self, place: int, most: int) -> list[int]:
        draft: list[int] = []
        while len(draft) < most and (token_id := self._at(place + len(draft))) is not None:
            draft.append(token_id)
        return draft

    def _search(self, token_ids: list[int]) -> tuple[int | None, int]:
        return self._texts.find(self._owner, token_ids)
