"""sentencepiece's BPE, exactly: the same ids as the sentencepiece library gives.

Written out here because no other engine is equal on every vocabulary: sentencepiece merges the
adjacent pair whose *joined piece* scores highest, the leftmost of equals; the `tokenizers` library
ranks (left, right) pairs, so it must order pieces of equal score, and the several splits of one
piece. Words are cached, so ordinary text costs a dictionary lookup a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from heapq import heapify, heappop, heappush

from llorch_worker.text.decoding_table import REPLACE_EACH_BYTE, DecodingTable
from llorch_worker.text.vocabulary import SPACE, PieceKind, Vocabulary

MAX_CACHED_WORDS = 50_000
MAX_CACHED_WORD_CHARS = 32


class SentencePieceCodec:
    """Text to ids and ids to bytes for a sentencepiece BPE vocabulary.

    Raises:
        ValueError: the vocabulary has neither byte pieces nor an unknown piece.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._scores = vocabulary.scores
        self._ids = vocabulary.ids_of(PieceKind.NORMAL, PieceKind.USER_DEFINED, PieceKind.UNUSED)
        self._unused = frozenset(
            piece
            for piece, token_id in self._ids.items()
            if vocabulary.kinds[token_id] == PieceKind.UNUSED
        )
        self._byte_ids = _byte_ids(vocabulary)
        unknown = vocabulary.ids_of(PieceKind.UNKNOWN)
        self._unknown_id = next(iter(unknown.values()), None)
        if self._byte_ids is None and self._unknown_id is None:
            raise ValueError("it has neither all 256 byte tokens nor an unknown token")
        self.special_ids = vocabulary.ids_of(PieceKind.UNKNOWN, PieceKind.CONTROL)
        self._split_special = _splitter(self.special_ids)
        self._user_defined = frozenset(vocabulary.ids_of(PieceKind.USER_DEFINED))
        self._split_user_defined = _splitter(self._user_defined)
        # No piece has a space after something else (true of every Llama vocabulary): then no
        # merge crosses from one word into the next, and words can be encoded one by one.
        crossing = re.compile(f"[^{SPACE}]{SPACE}")
        self._words_stand_alone = not any(map(crossing.search, self._ids))
        self._find_words = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+").findall
        self._cache: dict[str, tuple[int, ...]] = {}

    @cached_property
    def longest_token_chars(self) -> int | None:
        """No token covers more characters of a text than this; None where that has no bound."""
        if self.vocabulary.remove_extra_spaces or self._byte_ids is None:
            return None
        return max(map(len, [*self._ids, *self.special_ids]))

    def encode(self, text: str, parse_special: bool = False, literal_mark: str = "") -> list[int]:
        """Ids of ``text`` without BOS or EOS. ``parse_special``: control spellings become ids.

        Those with a ``literal_mark`` inside do not; the marks are dropped. Each stretch between
        control tokens gets its own space prefix, as in llama.cpp.
        """
        if not parse_special:
            return self._encode_text(text)
        ids: list[int] = []
        for part in self._split_special(text):
            special_id = self.special_ids.get(part)
            if special_id is not None:
                ids.append(special_id)
            else:
                ids += self._encode_text(part.replace(literal_mark, "") if literal_mark else part)
        return ids

    @cached_property
    def decoding_table(self) -> DecodingTable:
        vocabulary = self.vocabulary
        token_bytes: list[bytes] = []
        loses_first_space = set()
        for token_id, piece in enumerate(vocabulary.pieces):
            match vocabulary.kinds[token_id]:
                case PieceKind.CONTROL:
                    token_bytes.append(b"")
                case PieceKind.UNKNOWN:
                    token_bytes.append(vocabulary.unknown_surface.encode())
                case PieceKind.BYTE:
                    token_bytes.append(bytes([int(piece[3:5], 16)]))
                case _:
                    if piece.startswith(SPACE):
                        loses_first_space.add(token_id)
                    token_bytes.append(piece.replace(SPACE, " ").encode())
        if not (vocabulary.add_space_prefix or vocabulary.remove_extra_spaces):
            loses_first_space.clear()
        return DecodingTable(
            token_bytes,
            {
                token_id: spelling
                for spelling, token_id in self.special_ids.items()
                if vocabulary.kinds[token_id] == PieceKind.CONTROL
            },
            frozenset(loses_first_space),
            REPLACE_EACH_BYTE,
            control_ends_character=True,
        )

    def _encode_text(self, text: str) -> list[int]:
        if self.vocabulary.remove_extra_spaces:
            text = re.sub(" +", " ", text.lstrip(" "))
        if not text:
            return []
        if self.vocabulary.add_space_prefix:
            text = " " + text
        text = text.replace(" ", SPACE)
        if self.vocabulary.remove_extra_spaces:
            text = text.rstrip(SPACE)  # takes a stand-in that the user typed too, as the library
        ids: list[int] = []
        for part in self._split_user_defined(text):
            if part in self._user_defined:
                ids.append(self._ids[part])
            elif self._words_stand_alone:
                for word in self._find_words(part):
                    ids += self._encode_word(word)
            else:
                ids += self._encode_word(part)
        return ids if self._byte_ids is not None else self._join_unknown(ids)

    def _encode_word(self, word: str) -> Iterable[int]:
        cached = self._cache.get(word)
        if cached is not None:
            return cached
        ids: list[int] = []
        for piece in self._merge(word):
            token_id = self._ids.get(piece)
            if token_id is not None and piece not in self._unused:
                ids.append(token_id)
            elif self._byte_ids is not None:
                ids.extend(map(self._byte_ids.__getitem__, piece.encode()))
            else:
                assert self._unknown_id is not None
                ids.append(self._unknown_id)
        if len(word) <= MAX_CACHED_WORD_CHARS:
            if len(self._cache) >= MAX_CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = tuple(ids)
        return ids

    def _merge(self, word: str) -> list[str]:
        """The pieces of ``word``: merge the best-scored neighbours until none makes a piece."""
        symbols = list(word)  # a merged-away symbol becomes ""
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        piece_ids, scores = self._ids, self._scores
        splits: dict[str, tuple[str, str]] = {}

        def candidate(left: int, right: int) -> tuple[float, int, int, str] | None:
            merged = symbols[left] + symbols[right]
            token_id = piece_ids.get(merged)
            if token_id is None:
                return None
            if merged in self._unused:
                splits[merged] = (symbols[left], symbols[right])
            return (-scores[token_id], left, right, merged)

        agenda = [
            found
            for left in range(len(symbols) - 1)
            if (found := candidate(left, left + 1)) is not None
        ]
        heapify(agenda)
        while agenda:
            _, left, right, merged = heappop(agenda)
            if not symbols[left] or not symbols[right]:
                continue
            if len(symbols[left]) + len(symbols[right]) != len(merged):
                continue  # one of the two has grown since
            symbols[left], symbols[right] = merged, ""
            following = after[left] = after[right]
            if following < len(symbols):
                before[following] = left
                if (found := candidate(left, following)) is not None:
                    heappush(agenda, found)
            if before[left] >= 0 and (found := candidate(before[left], left)) is not None:
                heappush(agenda, found)
        pieces = [symbol for symbol in symbols if symbol]
        return pieces if not splits else [p for piece in pieces for p in _unmerge(piece, splits)]

    def _join_unknown(self, ids: list[int]) -> list[int]:
        """Without byte pieces a run of unknown characters is one unknown token."""
        unknown = self._unknown_id
        return [
            token_id
            for index, token_id in enumerate(ids)
            if token_id != unknown or index == 0 or ids[index - 1] != unknown
        ]


def _unmerge(piece: str, splits: dict[str, tuple[str, str]]) -> Iterable[str]:
    """Unused pieces serve as steps to longer ones, and are taken apart where they remain."""
    if piece not in splits:
        yield piece
        return
    for half in splits[piece]:
        yield from _unmerge(half, splits)


def _byte_ids(vocabulary: Vocabulary) -> list[int] | None:
    """Byte value -> token id, or None where the vocabulary lacks some of the 256."""
    pieces = vocabulary.ids_of(PieceKind.BYTE)
    for piece in pieces:
        if not re.fullmatch("<0x[0-9A-F]{2}>", piece):
            raise ValueError(f"its byte token {piece[:20]!r} is not of the form <0x41>")
    if len(pieces) != 256:
        return None
    return [pieces[f"<0x{value:02X}>"] for value in range(256)]


def _splitter(tokens: Iterable[str]) -> Callable[[str], list[str]]:
    """A function that splits a text into these tokens and what lies between, without empties."""
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    if not longest_first:
        return lambda text: [text] if text else []
    split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
    return lambda text: [part for part in split(text) if part]
