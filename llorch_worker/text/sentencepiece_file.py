"""Reads ``tokenizer.model``: sentencepiece's protobuf file, without protobuf.

Only the fields that a BPE vocabulary needs; their numbers are those of sentencepiece_model.proto:

    ModelProto      1 pieces*  2 trainer_spec  3 normalizer_spec
    SentencePiece   1 piece    2 score (float)  3 type (PieceKind, absent = NORMAL)
    TrainerSpec     3 model_type (2 = BPE)  24 treat_whitespace_as_suffix
                    44 unk_surface  46 bos_piece  47 eos_piece
    NormalizerSpec  2 precompiled_charsmap  3 add_dummy_prefix  4 remove_extra_whitespaces
                    5 escape_whitespaces
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llorch_worker.text.vocabulary import PieceKind, Vocabulary

_BPE = 2


@dataclass(frozen=True)
class SentencePieceFile:
    """What ``tokenizer.model`` says."""

    vocabulary: Vocabulary
    bos_token_id: int | None
    eos_token_id: int | None


def read_sentencepiece_file(path: Path) -> SentencePieceFile:
    """Raises ValueError where the file is damaged or of a kind that Llama models do not use."""
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[PieceKind] = []
    trainer = normalizer = b""
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(_bytes(value)))
                pieces.append(_bytes(piece[1]).decode())
                scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                kinds.append(PieceKind(_int(piece.get(3, PieceKind.NORMAL))))
            elif number == 2:
                trainer = _bytes(value)
            elif number == 3:
                normalizer = _bytes(value)
        training, normalizing = dict(_fields(trainer)), dict(_fields(normalizer))
        if not pieces:
            raise ValueError("no pieces")
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise ValueError("it is damaged, or no sentencepiece model") from error
    if training.get(3, 1) != _BPE:
        raise ValueError("it is a sentencepiece model, but not of the BPE kind")
    if normalizing.get(2):
        raise ValueError("it rewrites characters before encoding (precompiled_charsmap)")
    if training.get(24) or not normalizing.get(5, 1):
        raise ValueError("it writes spaces in a way that Llama models do not use")
    vocabulary = Vocabulary(
        pieces,
        scores,
        kinds,
        add_space_prefix=bool(normalizing.get(3, 1)),
        remove_extra_spaces=bool(normalizing.get(4, 1)),
        unknown_surface=_bytes(training.get(44, " \u2047 ".encode())).decode(),
    )
    control = vocabulary.ids_of(PieceKind.CONTROL)
    return SentencePieceFile(
        vocabulary,
        bos_token_id=control.get(_bytes(training.get(46, b"<s>")).decode()),
        eos_token_id=control.get(_bytes(training.get(47, b"</s>")).decode()),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one protobuf message: varints as int, the other wire types as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        match key & 7:
            case 0:
                value, position = _varint(data, position)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, position = _varint(data, position)
            case 5:
                size = 4
            case _:
                raise ValueError("unknown wire type")
        if position + size > len(data):
            raise ValueError("truncated field")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("expected bytes")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("expected a number")
    return value
