"""Vocabularies of tokenizer.model and of GGUF's kind "llama", through the `sentencepiece` library.

The library releases the GIL while it encodes, and its time is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from sentencepiece import SentencePieceProcessor

from llorch_worker.text.added_tokens import AddedToken
from llorch_worker.text.decoding_table import REPLACE_EACH_BYTE, DecodingTable, TokenBytes
from llorch_worker.text.definition_check import check_tokens
from llorch_worker.text.least_tokens import LeastTokens
from llorch_worker.text.sentencepiece_model import SPACE, Piece, PieceKind, with_space_prefix
from llorch_worker.text.spellings import any_of
from llorch_worker.text.stand_ins import NO_STAND_INS, StandIns

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class SentencePieceCodec:
    """Text to ids and ids to bytes for a sentencepiece model.

    ``pieces`` say what each id decodes to and which ids are control tokens; the model itself may
    differ there (see :func:`write_model`). ``added``: tokens by spelling that the model does not
    know, and those of its own that take white space. ``prefix_after_tokens``: see
    :class:`SentencePieceFile`.

    Raises:
        ValueError: the model is damaged, or writes spaces in a way that Llama models do not use.
    """

    transformers_class = "LlamaTokenizer"

    def __init__(
        self,
        model: bytes,
        pieces: Sequence[Piece],
        *,
        added: Mapping[str, AddedToken] = MappingProxyType({}),
        prefix_after_tokens: bool = True,
    ) -> None:
        self._processor = load_processor(model)
        self.special_ids: dict[str, int] = {}
        for token_id, piece in enumerate(pieces):
            if piece.text and piece.kind in (PieceKind.UNKNOWN, PieceKind.CONTROL):
                self.special_ids.setdefault(piece.text, token_id)
        texts = {token.text for token in added.values() if token.text not in self.special_ids}
        self._text_ids = {piece.text: i for i, piece in enumerate(pieces) if piece.text in texts}
        self._text_tokens = _pattern(self._text_ids, added)
        self._tokens = _pattern([*self._text_ids, *self.special_ids], added)
        takes_spaces = any(token.lstrip or token.rstrip for token in added.values())
        kept = self._processor.normalize("  a  a  ").count(SPACE) >= 6
        has_all_bytes = sum(piece.kind == PieceKind.BYTE for piece in pieces) >= 256
        self._keeps_bytes = kept and has_all_bytes and not takes_spaces
        spaces = self._processor.normalize(["a", " a"])
        if not all(re.fullmatch(f"{SPACE}*a", text) for text in spaces):
            raise ValueError("it writes spaces in a way that Llama models do not use")
        has_prefix = spaces[0] != "a"
        self._behind_tokens = (
            load_processor(with_space_prefix(model, False))
            if has_prefix and not prefix_after_tokens
            else self._processor
        )
        # Not the pieces: as objects they take as much as the library's own copy of them.
        self.decoding_table = self._decoding_table(pieces, spaces == ["a", f"{SPACE}a"])

    def encode(
        self, text: str, parse_special: bool = False, stand_ins: StandIns = NO_STAND_INS
    ) -> list[int]:
        """See :class:`Codec`. Each stretch between tokens gets its own space prefix, as in
        llama.cpp, or only one at the start of the text."""
        if not parse_special and not self._text_ids:
            return list(self._processor.encode(text))
        parts = (self._tokens if parse_special else self._text_tokens).split(text)
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(self._token_id(part))
                continue
            processor = self._behind_tokens if index else self._processor
            ids += processor.encode(stand_ins.meant(part))
        return ids

    def check_length(self, text: str, at_most: int) -> None:
        """See :class:`Codec`."""
        if self._keeps_bytes:
            normal = self._processor.normalize(text).removeprefix(SPACE)
            self._least.check(normal.replace(SPACE, " "), at_most)

    @cached_property
    def _least(self) -> LeastTokens:
        return LeastTokens(self.decoding_table.token_bytes, self.special_ids, range(256))

    def _token_id(self, matched: str) -> int:
        """The id of a token with the white space that it takes."""
        for spelling in (matched, matched.strip()):
            for ids in (self.special_ids, self._text_ids):
                if (token_id := ids.get(spelling)) is not None:
                    return token_id
        raise AssertionError("a pattern matched what is no token")

    def _decoding_table(self, pieces: Sequence[Piece], keeps_first_space: bool) -> DecodingTable:
        token_bytes = TokenBytes(self._bytes_of(i, piece) for i, piece in enumerate(pieces))
        spaced = (i for i, data in enumerate(token_bytes) if data.startswith(b" "))
        return DecodingTable(
            token_bytes,
            {
                i: _utf8(p.text).decode(errors="replace")
                for i, p in enumerate(pieces)
                if p.kind == PieceKind.CONTROL
            },
            drops_first_space=not keeps_first_space,
            # Of the unknown piece and of byte pieces.
            own_space=frozenset(i for i in spaced if not pieces[i].text.startswith(SPACE)),
            errors=REPLACE_EACH_BYTE,
            control_ends_character=True,
        )

    def _bytes_of(self, token_id: int, piece: Piece) -> bytes:
        text, _, kind = piece
        match kind:
            case PieceKind.CONTROL:
                return b""
            case PieceKind.UNKNOWN:
                surface: str = self._processor.decode([token_id])
                check_tokens([surface])
                return surface.encode()
            case PieceKind.BYTE:
                if not _BYTE_PIECE.fullmatch(text):
                    raise ValueError(f"its byte token {text[:20]!r} is not of the form <0x41>")
                return bytes([int(text[3:5], 16)])
            case _:
                return _utf8(text.replace(SPACE, " "))


def _utf8(text: str) -> bytes:
    """The bytes of a token in a file, which need not be UTF-8."""
    return text.encode(errors="surrogateescape")


def _pattern(spellings: Iterable[str], added: Mapping[str, AddedToken]) -> re.Pattern[str]:
    """Matches each of ``spellings``, the longest first, with the white space that it takes."""
    longest_first = sorted(spellings, key=len, reverse=True)
    # From the first of several spaces on: from each, the time would grow with their square.
    spaces = r"(?:(?<!\s)\s+)?"
    alternatives, ahead = [], ""
    for spelling in longest_first:
        token = added.get(spelling)
        before = spaces if token and token.lstrip else ""
        after = r"\s*" if token and token.rstrip else ""
        ahead = ahead or before
        alternatives.append(before + re.escape(spelling) + after)
    return re.compile(f"(?={ahead}{any_of(longest_first)})({'|'.join(alternatives)})")


def load_processor(model: bytes) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        reason = str(error).rpartition("]")[2].strip() or "unreadable"
        raise ValueError(f"it is damaged, or not a sentencepiece model: {reason}") from error
    return processor
