"""The bytes that each token id contributes to the text."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

REPLACE_EACH_BYTE = "llorch-replace-each-byte"


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd", error.start + 1


codecs.register_error(REPLACE_EACH_BYTE, _replace_one_byte)


@dataclass(frozen=True)
class DecodingTable:
    """Token id -> bytes, and the rules by which the bytes of many tokens become text.

    ``token_bytes[id]``: what a token adds inside a text; nothing for control tokens.
    ``control``: the spelling of each control token.
    ``loses_first_space``: tokens whose leading space is dropped at the start of a text, because
    encoding put it there.
    ``errors``: the UTF-8 error handler. sentencepiece writes U+FFFD for each invalid byte
    (:data:`REPLACE_EACH_BYTE`), byte-level BPE for each maximal invalid run ("replace").
    ``control_ends_character``: bytes before and after a control token never form one character,
    because sentencepiece decodes each run of byte pieces by itself.
    """

    token_bytes: Sequence[bytes]
    control: Mapping[int, str]
    loses_first_space: frozenset[int]
    errors: str
    control_ends_character: bool

    @cached_property
    def texts(self) -> Sequence[str | None]:
        """Token id -> its text, or None if it is not made of whole characters."""
        return tuple(map(_whole_text, self.token_bytes))

    def padded(self, size: int) -> DecodingTable:
        """The same table with at least ``size`` ids. The added ones have no text."""
        missing = size - len(self.token_bytes)
        if missing <= 0:
            return self
        return replace(self, token_bytes=[*self.token_bytes, *[b""] * missing])

    def check(self, token_id: int) -> None:
        """Raises ValueError for an id that the vocabulary does not have."""
        if not 0 <= token_id < len(self.token_bytes):
            raise ValueError(
                f"token id {token_id} is outside the vocabulary of {len(self.token_bytes)} tokens"
            )


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
