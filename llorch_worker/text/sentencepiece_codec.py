"""Vocabularies of tokenizer.model and of GGUF's kind "llama", through the `sentencepiece` library.

The library releases the GIL while it encodes, and its time is linear in the length of the text:
``python benches/bench_text.py MODEL``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from sentencepiece import SentencePieceProcessor

from llorch_worker.text.decoding_table import REPLACE_EACH_BYTE, DecodingTable, TokenBytes
from llorch_worker.text.sentencepiece_model import SPACE, Piece, PieceKind, write_pieces

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class SentencePieceCodec:
    """Text to ids and ids to bytes for a sentencepiece model.

    ``pieces`` say what each id decodes to and which ids are control tokens; the model itself may
    differ there (see :func:`write_model`).

    Raises:
        ValueError: the model is damaged, or writes spaces in a way that Llama models do not use.
    """

    transformers_class = "LlamaTokenizer"

    def __init__(self, model: bytes, pieces: Sequence[Piece]) -> None:
        self._processor = _load(model)
        # sentencepiece says -1 for a token that the model lacks.
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        self.bos_token_id = bos if bos >= 0 else None
        self.eos_token_id = eos if eos >= 0 else None
        self.special_ids: dict[str, int] = {}
        for token_id, piece in enumerate(pieces):
            if piece.text and piece.kind in (PieceKind.UNKNOWN, PieceKind.CONTROL):
                self.special_ids.setdefault(piece.text, token_id)
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        spaces = self._processor.normalize(["a", " a"])
        if not all(re.fullmatch(f"{SPACE}*a", text) for text in spaces):
            raise ValueError("it writes spaces in a way that Llama models do not use")
        # Not the pieces: as objects they take as much as the library's own copy of them.
        self.decoding_table = self._decoding_table(pieces, spaces == ["a", f"{SPACE}a"])

    @classmethod
    def from_file(cls, model: bytes, added: Mapping[int, Piece]) -> Self:
        """The codec of a tokenizer.model and the ``added`` pieces that follow its own by id."""
        processor = _load(model)
        with suppress(RuntimeError):
            # A file cut off between two pieces loads as unigram, the default kind, and only
            # unigram models have n-best lists.
            processor.nbest_encode("a", nbest_size=2)
            raise ValueError("it is a sentencepiece model, but not of the BPE kind")
        texts = [processor.id_to_piece(token_id) for token_id in range(processor.vocab_size())]
        pieces = [Piece(text, 0.0, _kind_of(processor, i)) for i, text in enumerate(texts)]
        while (piece := added.get(len(pieces))) is not None:
            pieces.append(piece)
        return cls(model + write_pieces(pieces[len(texts) :], taken=texts), pieces)

    def encode(self, text: str, parse_special: bool = False, literal_mark: str = "") -> list[int]:
        """See :class:`Codec`. Each stretch between control tokens gets its own space prefix, as
        in llama.cpp."""
        if not parse_special:
            return self._encode_text(text)
        ids: list[int] = []
        for part in self._special.split(text):
            if (special_id := self.special_ids.get(part)) is not None:
                ids.append(special_id)
            else:
                ids += self._encode_text(part.replace(literal_mark, "") if literal_mark else part)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def _decoding_table(self, pieces: Sequence[Piece], keeps_first_space: bool) -> DecodingTable:
        token_bytes = TokenBytes(self._bytes_of(i, piece) for i, piece in enumerate(pieces))
        spaced = (i for i, data in enumerate(token_bytes) if data.startswith(b" "))
        return DecodingTable(
            token_bytes,
            {i: piece.text for i, piece in enumerate(pieces) if piece.kind == PieceKind.CONTROL},
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
                return surface.encode()
            case PieceKind.BYTE:
                if not _BYTE_PIECE.fullmatch(text):
                    raise ValueError(f"its byte token {text[:20]!r} is not of the form <0x41>")
                return bytes([int(text[3:5], 16)])
            case _:
                return text.replace(SPACE, " ").encode()


def _load(model: bytes) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        reason = str(error).rpartition("]")[2].strip() or "unreadable"
        raise ValueError(f"it is damaged, or not a sentencepiece model: {reason}") from error
    return processor


def _kind_of(processor: SentencePieceProcessor, token_id: int) -> PieceKind:
    """Normal and user-defined pieces decode alike; the library does not distinguish them."""
    if processor.is_control(token_id):
        return PieceKind.CONTROL
    if processor.is_unknown(token_id):
        return PieceKind.UNKNOWN
    return PieceKind.BYTE if processor.is_byte(token_id) else PieceKind.NORMAL
