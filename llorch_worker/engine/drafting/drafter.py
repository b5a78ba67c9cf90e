"""What guesses the next tokens of one text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FROM_MODEL: Final = 0
"""The token that stands for those that a draft model has yet to compute."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, at least one. ``chances[i]`` estimates how likely ``token_ids[i]``
    and all before it come.

    A draft model computes its tokens only when the step wants them; until then ``behind`` says how
    many tokens its first pass has to compute for them, and ``token_ids`` are ``FROM_MODEL``."""

    token_ids: list[int]
    chances: list[float]
    behind: float = 0.0


class Drafter:
    """Belongs to one sequence. A wrong guess costs time, never a token: the engine keeps a draft
    token only if it is the one that it chooses itself."""

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """Up to ``most`` tokens that may follow ``token_ids``, which only grow between calls."""
        raise NotImplementedError

    def lose_blocks(self) -> None:
        """The sequence has no KV blocks any more."""

    def end(self, generated_ids: list[int]) -> None:
        """The text has ended, with these tokens."""
