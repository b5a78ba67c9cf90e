"""Writes vocabularies in sentencepiece's model format, without protobuf.

The field numbers are those of sentencepiece_model.proto:

    ModelProto      1 pieces*  2 trainer_spec  3 normalizer_spec
    SentencePiece   1 piece    2 score (float)  3 type (PieceKind)
    TrainerSpec     3 model_type (2 = BPE)      35 byte_fallback
    NormalizerSpec  3 add_dummy_prefix          4 remove_extra_whitespaces
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

SPACE = "\u2581"
"""sentencepiece's stand-in for a space."""
_BPE = 2
_NONCHARACTER = "\ufdd1"
_FLOAT = struct.Struct("<f").pack


class PieceKind(IntEnum):
    """The kind of a piece. GGUF's ``tokenizer.ggml.token_type`` uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of a vocabulary; its position is the token id."""

    text: str
    score: float
    kind: PieceKind


def write_model(
    pieces: Sequence[Piece], *, add_space_prefix: bool = True, remove_extra_spaces: bool = False
) -> bytes:
    """The BPE model of ``pieces``, as sentencepiece loads it.

    sentencepiece requires an unknown piece, and all 256 byte pieces or none. A missing unknown
    piece is added behind the others; an incomplete set of byte pieces is left out of encoding.

    Raises:
        ValueError: there are neither all 256 byte pieces nor an unknown piece.
    """
    kinds = {piece.kind for piece in pieces}
    byte_fallback = len({text for text, _, kind in pieces if kind == PieceKind.BYTE}) == 256
    if not byte_fallback:
        if PieceKind.UNKNOWN not in kinds:
            raise ValueError("it has neither all 256 byte tokens nor an unknown token")
        pieces = [
            piece._replace(kind=PieceKind.CONTROL) if piece.kind == PieceKind.BYTE else piece
            for piece in pieces
        ]
    elif PieceKind.UNKNOWN not in kinds:
        pieces = [*pieces, Piece(_NONCHARACTER, 0.0, PieceKind.UNKNOWN)]
    trainer = _field(3, _BPE) + _field(35, byte_fallback)
    normalizer = _field(3, add_space_prefix) + _field(4, remove_extra_spaces)
    return _write_pieces(pieces) + _field(2, trainer) + _field(3, normalizer)


def _write_pieces(pieces: Iterable[Piece]) -> bytes:
    """sentencepiece refuses empty, repeated and undecodable texts, and a second unknown piece. Such
    pieces keep their ids, but encoding never gives them.
    """
    data = bytearray()
    seen = {""}
    knows_unknown = False
    for text, score, kind in pieces:
        second = kind == PieceKind.UNKNOWN and knows_unknown
        knows_unknown |= kind == PieceKind.UNKNOWN
        if text in seen or second or text != text.encode(errors="replace").decode():
            text, kind = f"{_NONCHARACTER}{len(seen)}", PieceKind.CONTROL
        seen.add(text)
        # As of ``_field``, but at once: a vocabulary has up to hundreds of thousands.
        spelt = text.encode()
        piece = b"\x0a%b%b\x15%b\x18%c" % (_varint(len(spelt)), spelt, _FLOAT(score), kind)
        data += b"\x0a%b%b" % (_varint(len(piece)), piece)
    return bytes(data)


def with_kinds(model: bytes, kinds: Mapping[int, PieceKind]) -> bytes:
    """``model`` with other kinds for the pieces with these ids."""
    data = bytearray()
    at = piece = 0
    while at < len(model):
        start = at
        tag, at = _read_varint(model, at)
        length, at = _read_varint(model, at)  # all fields of the model are messages
        at += length
        if tag == 1 << 3 | 2:
            if (kind := kinds.get(piece)) is not None:
                # Of a repeated field, the last value counts.
                data += _field(1, model[at - length : at] + _field(3, kind))
                start = at
            piece += 1
        data += model[start:at]
    return bytes(data)


def with_space_prefix(model: bytes, space_prefix: bool) -> bytes:
    """``model``, but whether it puts a space in front of a text is given."""
    return model + _field(3, _field(3, space_prefix))


def charsmap_of(model: bytes) -> bytes:
    """What ``model`` normalizes characters to, in sentencepiece's own form."""
    specs = [content for tag, content in _messages(model) if tag == 3 << 3 | 2]
    maps = [content for spec in specs for tag, content in _messages(spec) if tag == 2 << 3 | 2]
    return maps[-1] if maps else b""


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and contents of the fields with a length, but for short pieces."""
    at = 0
    while at < len(data):
        if data[at] == 0x0A and at + 1 < len(data) and data[at + 1] < 0x80:
            at += 2 + data[at + 1]  # most of a model, so without a call
            continue
        tag, at = _read_varint(data, at)
        if tag & 7 == 2:
            length, at = _read_varint(data, at)
            yield tag, data[at : at + length]
            at += length
        elif tag & 7 == 0:
            _, at = _read_varint(data, at)
        else:
            at += 8 if tag & 7 == 1 else 4


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def _field(number: int, value: float | str | bytes) -> bytes:
    match value:
        case int():
            return _varint(number << 3) + _varint(value)
        case float():
            return _varint(number << 3 | 5) + struct.pack("<f", value)
        case str():
            value = value.encode()
    return _varint(number << 3 | 2) + _varint(len(value)) + value


_BYTES = tuple(bytes([value]) for value in range(0x80))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _BYTES[value]
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
