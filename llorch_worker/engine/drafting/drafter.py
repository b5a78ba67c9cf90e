"""What guesses the next tokens of one text."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Protocol


class Drafter(Protocol):
    """Belongs to one sequence. A wrong guess costs time, never a token: the engine keeps a draft
    token only if it is the one that it chooses itself."""

    def propose(self, token_ids: list[int], most: int) -> Ids[int]:
        """Up to ``most`` tokens that may follow ``token_ids``, which only grow between calls."""
