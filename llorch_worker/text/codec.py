"""The interface of a vocabulary for the tokenizer and the chat formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from llorch_worker.text.decoding_table import DecodingTable
from llorch_worker.text.stand_ins import NO_STAND_INS, StandIns


class Codec(Protocol):
    """Text to ids without BOS or EOS, and ids to bytes. Safe to share between threads."""

    transformers_class: str
    """The class of transformers that reads such a vocabulary."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Spelling -> id of the tokens that text becomes only with ``parse_special``."""
        ...

    @property
    def decoding_table(self) -> DecodingTable: ...

    def encode(
        self, text: str, parse_special: bool = False, stand_ins: StandIns = NO_STAND_INS
    ) -> list[int]:
        """Ids of ``text``. ``parse_special``: spellings of control tokens become their ids.

        A spelling with one of ``stand_ins`` stays text. Python's lock is free while it tokenises.
        """
        ...

    def check_length(self, text: str, at_most: int) -> None:
        """Raises TooManyTokens if ``text`` has certainly more than ``at_most``; does not tokenise.

        A text with a few more passes, and any that the vocabulary may shorten before it splits it.
        """
        ...
