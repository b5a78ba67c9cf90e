"""A model's vocabulary as llguidance sees it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from llorch_worker.text import Tokenizer
from llorch_worker.text.dialects import Dialect

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SPECIAL = b"\xff"
"""llguidance's mark of a token that is not text. UTF-8 never has this byte."""
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,30}']
"""Tokens that a grammar mostly allows all or not at all: text inside a JSON string. llguidance has
two tries of the vocabulary for each slice. Its other three slices make masks hardly faster and take
10 MiB for 32,000 tokens."""

MOST_FORCED_BYTES: Final = 1_024
"""How much of a text that a grammar forces is spelt at once. Python's other threads wait for it,
and a short grammar may force megabytes."""
_CUT_TOKENS: Final = 16
"""How many tokens before such a cut may have other spellings in the whole text."""


class ConstraintVocabulary:
    """The tokens that constrained texts are made of, and one more id, which stands for the end.

    llguidance allows ``end_id`` wherever a text may end. The tokens that may end it are chosen for
    each mask, because stop tokens, ``min_tokens`` and ``ignore_eos`` differ between requests.
    """

    # What llguidance asks of a tokenizer, besides ``tokens`` and a call.
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """``vocab_size``: the number of the model's logits. ``eos_ids`` are all below it."""
        self.end_id = self.eos_token_id = vocab_size
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer
        control = tokenizer.decoding_table.control
        self.control = {i: spelling for i, spelling in control.items() if i < vocab_size}
        self.special_token_ids = [*self.control, self.end_id]

    @property
    def dialect(self) -> Dialect:
        """How the model writes calls of tools."""
        return self._tokenizer.dialect

    @property
    def control_ids(self) -> dict[str, int]:
        """Of the dialect's marks that are control tokens."""
        spellings = self._tokenizer.control_spellings(self.dialect.marks())
        return {spelling: token_id for token_id, spelling in spellings.items()}

    @cached_property
    def ll_tokenizer(self) -> LLTokenizer:
        """Built on first use."""
        from llguidance import LLTokenizer

        return LLTokenizer(self, n_vocab=self.end_id + 1, slices=_SLICES)  # type: ignore[arg-type]

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each id, ``end_id`` included. An id without bytes is never allowed."""
        table = self._tokenizer.decoding_table
        tokens = [*table.token_bytes[: self.end_id]]
        tokens += [b""] * (self.end_id - len(tokens)) + [_SPECIAL + b"<end>"]
        for token_id, spelling in self.control.items():
            tokens[token_id] = _SPECIAL + spelling.encode(errors="replace")
        return tokens

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of ``text`` inside a longer text; of its beginning if it cannot be spelt, or
        is longer than ``MOST_FORCED_BYTES``."""
        data = text if isinstance(text, bytes) else text.encode()
        if len(data) > MOST_FORCED_BYTES:
            whole = data[:MOST_FORCED_BYTES].decode(errors="ignore").encode()
            ids = self._spelt(whole or data[:MOST_FORCED_BYTES])
            return ids[:-_CUT_TOKENS] or ids[:1]
        return self._spelt(data)

    def _spelt(self, data: bytes) -> list[int]:
        ids = self._tokenizer.encode_inside(data.decode(errors="replace"))
        # Some vocabularies change text as they encode it, and a forced token must fit.
        if b"".join([self.tokens[token_id] for token_id in ids]) == data:
            return ids
        return self._longest_first(data)

    def spells(self, text: bytes) -> bool:
        """Whether some sequence of tokens has exactly these bytes."""
        if all(text[at : at + 1] in self._ids for at in range(len(text))):
            return True
        reached = {0}
        for end in range(1, len(text) + 1):
            starts = range(max(0, end - self._longest), end)
            if any(start in reached and text[start:end] in self._ids for start in starts):
                reached.add(end)
        return len(text) in reached

    def _longest_first(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            length = next((n for n in lengths if text[at : at + n] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[text[at : at + length]])
            at += length
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {data: token_id for token_id, data in enumerate(self.tokens) if data}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)
