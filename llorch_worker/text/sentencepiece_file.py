"""A tokenizer.model with what its folder changes: added tokens, control tokens, spaces."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from sentencepiece import SentencePieceProcessor

from llorch_worker.model_files.bounds import GROWTH, TOKENS, check
from llorch_worker.text.added_tokens import AddedToken
from llorch_worker.text.definition_check import check_charsmap, check_tokens
from llorch_worker.text.sentencepiece_codec import SentencePieceCodec, load_processor
from llorch_worker.text.sentencepiece_model import (
    SPACE,
    Piece,
    PieceKind,
    charsmap_of,
    with_kinds,
    with_space_prefix,
)

_MAX_ADDED = 65_536
"""Larger ids of added tokens mean another model's vocabulary."""


class SentencePieceFile:
    """A tokenizer.model and the tokens that its folder adds: by id, and ``more`` behind them.

    ``space_prefix``: whether a space is put in front of a text; None: as the model says.
    ``prefix_after_tokens``: whether that also holds for the text behind an added or control token,
    which transformers calls legacy.

    Raises:
        ValueError: the model is damaged, or not of the BPE kind.
    """

    def __init__(
        self,
        model: bytes,
        added: Mapping[int, AddedToken],
        *,
        more: Iterable[AddedToken] = (),
        space_prefix: bool | None = None,
        prefix_after_tokens: bool = True,
    ) -> None:
        processor = load_processor(model)
        with suppress(RuntimeError):
            # A file cut off between two pieces loads as unigram, the default kind, and only
            # unigram models have n-best lists.
            processor.nbest_encode("a", nbest_size=2)
            raise ValueError("it is a sentencepiece model, but not of the BPE kind")
        # It writes a longer sign for a space.
        growth = math.ceil(check_charsmap(charsmap_of(model)) * len(SPACE.encode()))
        check("tokenizer.model: the growth of a text in its normalizer", growth, GROWTH)
        # sentencepiece says -1 for a token that the model lacks.
        bos, eos = processor.bos_id(), processor.eos_id()
        self.bos_token_id = bos if bos >= 0 else None
        self.eos_token_id = eos if eos >= 0 else None
        self._model = model if space_prefix is None else with_space_prefix(model, space_prefix)
        self._prefix_after_tokens = prefix_after_tokens
        size = processor.vocab_size()
        check("tokenizer.model: the number of tokens", size, TOKENS)
        self._pieces = [
            Piece(processor.id_to_piece(i), 0.0, _kind_of(processor, i)) for i in range(size)
        ]
        check_tokens(piece.text for piece in self._pieces)
        self._own_kinds = [piece.kind for piece in self._pieces]
        known = {piece.text for piece in self._pieces}
        fresh = [token for token in more if token.text not in known]
        self.appended = frozenset(token.text for token in fresh)
        """The spellings of what was added of ``more``."""
        behind = max((size - 1, *added)) + 1
        self._added = added = {**added, **dict(enumerate(fresh, behind))}
        for token_id, token in sorted(added.items()):
            if token.single_word:
                raise ValueError(f"its token {token.text!r} is for single words only")
            if not 0 <= token_id < size + _MAX_ADDED:
                raise ValueError(f"it adds a token as id {token_id} to a vocabulary of {size}")
            missing = token_id + 1 - len(self._pieces)
            self._pieces += [Piece("", 0.0, PieceKind.UNUSED)] * missing
            kind = PieceKind.CONTROL if token.special else PieceKind.USER_DEFINED
            if self._pieces[token_id].kind != PieceKind.UNKNOWN:
                self._pieces[token_id] = Piece(token.text, 0.0, kind)
        self._ids = {piece.text: i for i, piece in reversed([*enumerate(self._pieces)])}

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self._pieces)

    def token_to_id(self, token: str, /) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token_id: int, /) -> str | None:
        return self._pieces[token_id].text if 0 <= token_id < len(self._pieces) else None

    def with_control(self, spellings: Collection[str]) -> SentencePieceCodec:
        """The vocabulary's codec, in which these tokens are control tokens too."""
        for spelling in spellings:
            token_id = self._ids[spelling]
            if self._pieces[token_id].kind != PieceKind.UNKNOWN:
                self._pieces[token_id] = self._pieces[token_id]._replace(kind=PieceKind.CONTROL)
        # The library itself must give no id to the spelling of a control or added token.
        matched = {
            token_id: PieceKind.CONTROL
            for token_id, own in enumerate(self._own_kinds)
            if own in (PieceKind.NORMAL, PieceKind.USER_DEFINED)
            and (self._pieces[token_id].kind == PieceKind.CONTROL or token_id in self._added)
        }
        return SentencePieceCodec(
            with_kinds(self._model, matched) if matched else self._model,
            self._pieces,
            added={token.text: token for token in self._added.values()},
            prefix_after_tokens=self._prefix_after_tokens,
        )


def _kind_of(processor: SentencePieceProcessor, token_id: int) -> PieceKind:
    """Normal and user-defined pieces decode alike; the library does not distinguish them."""
    if processor.is_control(token_id):
        return PieceKind.CONTROL
    if processor.is_unknown(token_id):
        return PieceKind.UNKNOWN
    return PieceKind.BYTE if processor.is_byte(token_id) else PieceKind.NORMAL
