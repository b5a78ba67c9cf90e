"""What guesses the next tokens of one text, and how likely its guesses hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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


PRIORS: Final = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.95)
"""By the class of the match. Of a place that shares the last 2 or 3 tokens, two in five hold; of
one that shares 32 and more, nearly all."""
RATE: Final = 1 / 8
"""How much the newest token counts."""


class Acceptance:
    """How likely the next token of a text is the one that follows a place which the text repeats:
    estimates for one sequence, by the length of its match with the place.

    It learns from every token that has a guess, whether the guess was computed as a draft or not.
    So it sees when guesses begin to hold again after drafts have ceased to pay.
    """

    def __init__(self) -> None:
        self._chances = list(PRIORS)

    def note(self, matched: int, held: bool) -> None:
        """A token has come whose guess followed a match of ``matched`` tokens."""
        of = _class_of(matched)
        self._chances[of] += (held - self._chances[of]) * RATE

    def chances(self, matched: int, count: int) -> list[float]:
        """For each of ``count`` guesses in a row, the chance that it and all before it hold."""
        chance, chances = 1.0, []
        for more in range(count):
            chance *= self._chances[_class_of(matched + more)]
            chances.append(chance)
        return chances


def _class_of(matched: int) -> int:
    """1, 2 to 3, 4 to 7 ... tokens."""
    return min(matched.bit_length(), len(PRIORS) - 1)
