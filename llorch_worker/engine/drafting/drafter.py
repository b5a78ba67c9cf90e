"""What guesses the next tokens of one text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, at least one. ``chances[i]`` estimates how likely ``token_ids[i]``
    and all before it come."""

    token_ids: list[int]
    chances: list[float]


class Drafter:
    """Belongs to one sequence. A wrong guess costs time, never a token: the engine keeps a draft
    token only if it is the one that it chooses itself."""

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """Up to ``most`` tokens that may follow ``token_ids``, which only grow between calls."""
        raise NotImplementedError

    def end(self, generated_ids: list[int]) -> None:
        """The text has ended, with these tokens."""
