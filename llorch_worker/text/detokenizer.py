"""Token ids to text while they are being generated."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from llorch_worker.text.decoding_table import DecodingTable


class HasDecodingTable(Protocol):
    @property
    def decoding_table(self) -> DecodingTable: ...


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text, releasing only whole characters.

    With ``continuation=True`` the tokens follow a prompt and a leading space stays. Otherwise the
    pieces join to ``tokenizer.decode(ids)``.

    Runs on the engine's thread for every token.
    """

    __slots__ = ("_at_start", "_decoder", "_pending", "_table")

    def __init__(self, tokenizer: HasDecodingTable, continuation: bool = True) -> None:
        table = tokenizer.decoding_table
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=table.errors)
        self._at_start = not continuation and table.drops_first_space
        self._pending = False

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that ``token_ids`` complete. Raises ValueError for an id out of range."""
        parts = []
        data, borders = self._table.token_bytes.packed
        size = len(borders) - 1
        for token_id in token_ids:
            if self._pending or self._at_start or not 0 <= token_id < size:
                parts.append(self._push_slowly(token_id))
                continue
            try:
                parts.append(data[borders[token_id] : borders[token_id + 1]].decode())
            except UnicodeDecodeError:
                parts.append(self._push_slowly(token_id))
        return "".join(parts)

    def flush(self) -> str:
        """U+FFFD for an unfinished character, or nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._pending = False
        return text

    def _push_slowly(self, token_id: int) -> str:
        table = self._table
        table.check(token_id)
        if table.control_ends_character and token_id in table.control:
            return self.flush()
        data = table.token_bytes[token_id]
        if self._at_start and data:
            self._at_start = False
            if data.startswith(b" ") and token_id not in table.own_space:
                data = data[1:]
        text = self._decoder.decode(data)
        self._pending = bool(self._decoder.getstate()[0])
        return text
