"""Drafts from the texts of recent sequences of the same tenant."""

from __future__ import annotations

from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Final

import numpy as np

from llorch_worker.engine.drafting.drafter import Acceptance, Draft, Drafter

NEEDLE_TOKENS: Final = 3
"""How many of the last tokens a recent text must share to be found."""
LONGEST_MATCH: Final = 32
TOKEN_BYTES: Final = 4 + 8 + 8
"""An id, whose text it is, and a place in the index."""
_END: Final = -1
_MASK: Final = 2**64 - 1
_FACTOR: Final = 0x9E3779B97F4A7C15


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
        ids = np.array([*kept, _END], np.int32)
        places = np.arange(self._written, self._written + len(ids))
        self._ids[places % self._size] = ids
        self._owners[places % self._size] = owner
        self._written += len(ids)
        if len(kept) < NEEDLE_TOKENS:
            return
        a, b, c = (ids[i : len(kept) - NEEDLE_TOKENS + 1 + i].astype(np.uint64) for i in range(3))
        self._places[self._slot(owner, a, b, c)] = places[NEEDLE_TOKENS:]

    def find(self, owner: int, token_ids: list[int]) -> tuple[int | None, int]:
        """The latest place in a text of ``owner`` after the last of ``token_ids``, and the length
        of the match before it."""
        if len(token_ids) < NEEDLE_TOKENS:
            return None, 0
        place = int(self._places[self._slot(owner, *token_ids[-NEEDLE_TOKENS:])])
        matched = 0
        while (
            matched < min(LONGEST_MATCH, len(token_ids))
            and self.at(owner, place - 1 - matched) == token_ids[-1 - matched]
        ):
            matched += 1
        return (place, matched) if matched >= NEEDLE_TOKENS else (None, 0)

    def at(self, owner: int, place: int) -> int | None:
        """The token at ``place`` if a text of ``owner`` has one there."""
        index = place % self._size
        if not max(0, self._written - self._size - 1) < place < self._written:
            return None
        if int(self._owners[index]) != owner or self._ids[index] == _END:
            return None
        return int(self._ids[index])

    def _slot(self, owner: int, a: Any, b: Any, c: Any) -> Any:
        """Where the index has three tokens: ints, or uint64 arrays of which it has many."""
        mixed = ((a * _FACTOR + b) * _FACTOR + c) * _FACTOR + owner
        return ((mixed * _FACTOR) & _MASK) >> (64 - self._bits)


class RecentLookup(Drafter):
    """Goes on where a recent text of the same tenant went on; see ``PromptLookup``."""

    def __init__(self, texts: RecentTexts, tenant: str | None) -> None:
        self._texts = texts
        self._owner = texts.owner(tenant)
        self._known = 0
        self._next: int | None = None
        self._matched = 0
        self._acceptance = Acceptance()

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``."""
        self._follow(token_ids)
        draft: list[int] = []
        while self._next is not None and len(draft) < most:
            token_id = self._texts.at(self._owner, self._next + len(draft))
            if token_id is None:
                break
            draft.append(token_id)
        if not draft:
            return None
        return Draft(draft, self._acceptance.chances(self._matched, len(draft)))

    def end(self, generated_ids: list[int]) -> None:
        """See ``Drafter``."""
        self._texts.add(self._owner, generated_ids)

    def _follow(self, token_ids: list[int]) -> None:
        fresh, self._known = token_ids[self._known :], len(token_ids)
        for token_id in fresh:
            if (
                self._next is not None
                and (guess := self._texts.at(self._owner, self._next)) is not None
            ):
                self._acceptance.note(self._matched, guess == token_id)
                if guess == token_id:
                    self._next += 1
                    self._matched += 1
                    continue
            self._next, self._matched = self._texts.find(self._owner, token_ids)
            return
