"""The bytes that each token id contributes to the text."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import overload

REPLACE_EACH_BYTE = "llorch-replace-each-byte"


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd", error.start + 1


codecs.register_error(REPLACE_EACH_BYTE, _replace_one_byte)


class TokenBytes(Sequence[bytes]):
    """The bytes of each token id: a list that takes a fifth of a list's memory.

    ``packed``: the bytes of all tokens one after the other; where each begins, and the last ends.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        data = bytearray()
        borders = array("I", [0])
        for token in tokens:
            data += token
            borders.append(len(data))
        self.packed = bytes(data), borders

    def __len__(self) -> int:
        return len(self.packed[1]) - 1

    @overload
    def __getitem__(self, token_id: int) -> bytes: ...

    @overload
    def __getitem__(self, token_id: slice) -> list[bytes]: ...

    def __getitem__(self, token_id: int | slice) -> bytes | list[bytes]:
        """Of one id, which is not negative, or of a slice of them."""
        if isinstance(token_id, slice):
            return [self[i] for i in range(*token_id.indices(len(self)))]
        data, borders = self.packed
        return data[borders[token_id] : borders[token_id + 1]]


@dataclass(frozen=True)
class DecodingTable:
    """Token id -> bytes, and the rules by which the bytes of many tokens become text.

    ``token_bytes[id]``: what a token adds inside a text; nothing for control tokens.
    ``control``: the spelling of each control token.
    ``drops_first_space``: the space that a text begins with is dropped, because encoding put it
    there. ``own_space``: tokens that begin with a space which is never dropped.
    ``errors``: the UTF-8 error handler. sentencepiece writes U+FFFD for each invalid byte
    (:data:`REPLACE_EACH_BYTE`), byte-level BPE for each maximal invalid run ("replace").
    ``control_ends_character``: bytes before and after a control token never form one character,
    because sentencepiece decodes each run of byte pieces by itself.
    """

    token_bytes: TokenBytes
    control: Mapping[int, str]
    drops_first_space: bool
    own_space: frozenset[int]
    errors: str
    control_ends_character: bool

    def padded(self, size: int) -> DecodingTable:
        """The same table with at least ``size`` ids. The added ones have no text."""
        missing = size - len(self.token_bytes)
        if missing <= 0:
            return self
        return replace(self, token_bytes=TokenBytes(chain(self.token_bytes, repeat(b"", missing))))

    def check(self, token_id: int) -> None:
        """Raises ValueError for an id that the vocabulary does not have."""
        if not 0 <= token_id < len(self.token_bytes):
            raise ValueError(
                f"token id {token_id} is outside the vocabulary of {len(self.token_bytes)} tokens"
            )
