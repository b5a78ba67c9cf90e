"""What each token id contributes to the text, as bytes."""

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

    ``token_bytes[id]`` is what a token adds in the middle of a text; control tokens add nothing.
    ``control`` gives the literal text of the control tokens. ``loses_first_space`` are the tokens
    whose leading space is dropped at the start of a text, because encoding put it there.

    ``errors`` is the UTF-8 error handler: sentencepiece writes U+FFFD for each invalid byte
    (:data:`REPLACE_EACH_BYTE`), byte-level BPE for each maximal invalid run ("replace").
    ``control_ends_character`` says that bytes on both sides of a control token never make one
    character (sentencepiece decodes each run of byte pieces by itself).
    """

    token_bytes: Sequence[bytes]
    control: Mapping[int, str]
    loses_first_space: frozenset[int]
    errors: str
    control_ends_character: bool

    @cached_property
    def texts(self) -> Sequence[str | None]:
        """Token id -> its text where it is made of whole characters, else None."""
        return tuple(map(_whole_text, self.token_bytes))

    @cached_property
    def with_control(self) -> DecodingTable:
        """The same table, with control tokens written out."""
        spelt = list(self.token_bytes)
        for token_id, text in self.control.items():
            spelt[token_id] = text.encode()
        return replace(self, token_bytes=spelt, control={}, control_ends_character=False)

    def padded(self, size: int) -> DecodingTable:
        """The same table with at least ``size`` ids; the added ones stand for no text."""
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
