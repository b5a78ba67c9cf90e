"""A sentencepiece vocabulary, whichever file it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

SPACE = "\u2581"
"""sentencepiece's stand-in for a space, so that pieces can be listed one a line."""


class PieceKind(IntEnum):
    """What a piece is for. GGUF's ``tokenizer.ggml.token_type`` uses sentencepiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Pieces with their merge scores, all of one length: the index is the token id."""

    pieces: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[PieceKind]
    add_space_prefix: bool = True
    remove_extra_spaces: bool = False
    unknown_surface: str = " \u2047 "

    def __post_init__(self) -> None:
        if not len(self.pieces) == len(self.scores) == len(self.kinds):
            raise ValueError(
                f"{len(self.pieces)} pieces, {len(self.scores)} scores and {len(self.kinds)} types"
            )

    def ids_of(self, *kinds: PieceKind) -> dict[str, int]:
        """Piece -> id, for the pieces of these kinds. The first of two equal pieces counts."""
        ids: dict[str, int] = {}
        for token_id, (piece, kind) in enumerate(zip(self.pieces, self.kinds, strict=True)):
            if kind in kinds:
                ids.setdefault(piece, token_id)
        return ids
