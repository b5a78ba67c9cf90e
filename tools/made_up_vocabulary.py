"""A vocabulary for models with random weights: Llama's layout with meaningless pieces."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

SPACE = "\u2581"
MAX_PIECE_CHARS = 12
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""sentencepiece's types of pieces, which GGUF uses too."""
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True)
class MadeUpVocabulary:
    """Pieces, merge scores and types; the index is the token id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]


def smallest_size() -> int:
    """Control tokens, all bytes, and the letters that all other pieces are merged from."""
    return 3 + 256 + len(_letters())


def made_up_vocabulary(size: int, seed: int) -> MadeUpVocabulary:
    """``size`` pieces: <unk>, <s>, </s>, 256 bytes, merged pieces, then single letters.

    Each merged piece joins two earlier ones and scores lower than both, so that an encoder reaches
    it by merges, as in a trained vocabulary. Raises ValueError below :func:`smallest_size`.
    """
    letters = _letters()
    if size < smallest_size():
        raise ValueError(f"a vocabulary needs at least {smallest_size()} tokens, not {size}")
    chance = random.Random(seed)
    merged: list[str] = []
    known = set(letters)
    starts = [SPACE, *string.ascii_lowercase]
    parts = list(string.ascii_lowercase)
    while len(merged) < size - smallest_size():
        piece = chance.choice(starts) + chance.choice(parts)
        if len(piece) > MAX_PIECE_CHARS or piece in known:
            continue
        known.add(piece)
        merged.append(piece)
        starts.append(piece)
        if not piece.startswith(SPACE):
            parts.append(piece)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    special = len(pieces)
    scores = [0.0] * special + [-float(rank) for rank in range(len(merged) + len(letters))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(merged) + len(letters))]
    return MadeUpVocabulary([*pieces, *merged, *letters], scores, types)


def _letters() -> list[str]:
    return [SPACE, *string.ascii_letters, *string.digits, *string.punctuation]
