"""What keeps a user's spelling of a control token text on its way through a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any
from urllib.parse import quote

from llorch_worker.text.spellings import any_of

_LETTERS = tuple(
    (chr(capital + distance), chr(capital))
    for first, distance, count in (
        *((0x2C00, 0x30, 47), (0x10C80, 0x40, 51), (0x118A0, 0x20, 32), (0x10400, 0x28, 40)),
        *((0x104B0, 0x28, 36), (0x1E900, 0x22, 34)),
    )
    for capital in range(first, first + count)
)
"""Small and capital letters that hardly any text has: Glagolitic, Old Hungarian, Warang Citi,
Deseret, Osage and Adlam."""
_SIGNS = tuple(map(chr, (*range(0x4DC0, 0x4E00), *range(0x2800, 0x2900))))
"""Signs without case: hexagrams and Braille."""
_PRIVATE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""Where a text has all of those. Python does not call them printable."""
_ESCAPES: tuple[Callable[[str], str], ...] = (
    lambda char: json.dumps(char)[1:-1],
    lambda char: ascii(char)[1:-1],
    quote,
)
"""How filters may spell a character that is not ASCII."""
_ESCAPED = re.compile(
    r"(?=(\\u[0-9a-f]{4})(\\u[0-9a-f]{4})?|(\\U[0-9a-f]{8})"
    r"|(%[0-9A-F]{2}%[0-9A-F]{2}%[0-9A-F]{2})(%[0-9A-F]{2})?)"
)
"""Such spellings of the characters above."""


@dataclass(frozen=True)
class StandIns:
    """Characters, each in place of one in the spelling of a control token.

    Templates calculate with texts: they measure, cut, join, sort and quote them. A stand-in is one
    character for one, printable, a letter for a letter of the same case, and always the same one in
    equal chats. So texts come out as they would without it. Only to a template that looks for the
    spelling of a control token in a user's text, or sorts by its letters, it is another.
    """

    meanings: Mapping[str, str]
    """Stand-in -> the character that the user wrote."""

    def unescaped(self, text: str) -> str:
        """A rendered ``text``, its stand-ins as they were put in, even if a filter escaped them."""
        for char, meaning in self.meanings.items():
            for escape in _ESCAPES:
                spelt = escape(meaning)
                text = text.replace(escape(char), char if spelt == meaning else spelt)
        return text

    def meant(self, text: str) -> str:
        """``text`` as the user wrote it."""
        return text.translate({ord(char): meaning for char, meaning in self.meanings.items()})


NO_STAND_INS = StandIns({})


class ControlFinder:
    """Finds the ``spellings`` of control tokens in texts, and puts stand-ins into them."""

    def __init__(self, spellings: Iterable[str]) -> None:
        # Nothing can stand inside a spelling of one character.
        self._beginning = re.compile(f"(?=({any_of({s for s in spellings if len(s) > 1})}))")

    def stand_ins(self, value: Any, beside: Collection[str]) -> StandIns:
        """Those that the texts in ``value`` need, if they spell any control token: characters
        that neither they nor the texts ``beside`` them have.

        Raises ValueError if there are none left.
        """
        texts = list(_texts(value))
        needed = {_small(text[at]) for text in texts for at in self._places(text)}
        if not needed:
            return NO_STAND_INS
        whole = "\n".join([*texts, *beside])
        used = set(whole)
        for found in _ESCAPED.finditer(whole):
            used.update(accumulate(filter(None, found.groups())))

        def is_free(char: str) -> bool:
            return used.isdisjoint((char, *(escape(char) for escape in _ESCAPES)))

        private = filter(is_free, map(chr, _PRIVATE))
        letters = chain(
            (pair for pair in _LETTERS if all(map(is_free, pair))),
            zip(private, private, strict=False),
        )
        signs = chain(filter(is_free, _SIGNS), private)
        meanings: dict[str, str] = {}
        try:
            for char in sorted(needed):
                if _is_letter(char):
                    meanings |= zip(next(letters), (char, char.upper()), strict=True)
                else:
                    meanings[next(signs)] = char
        except StopIteration:
            raise ValueError("no character is left that they do not have") from None
        return StandIns(meanings)

    def put(self, value: Any, stand_ins: StandIns) -> Any:
        """``value`` with a stand-in in every spelling of a control token, in keys too."""
        if not stand_ins.meanings:
            return value
        chars = {meaning: char for char, meaning in stand_ins.meanings.items()}

        def put(value: Any) -> Any:
            match value:
                case str():
                    parts, end = [], 0
                    for at in sorted({*self._places(value)}):
                        parts += [value[end:at], chars[value[at]]]
                        end = at + 1
                    return "".join([*parts, value[end:]])
                case dict():
                    return {put(key): put(item) for key, item in value.items()}
                case list():
                    return [put(item) for item in value]
            return value

        return put(value)

    def _places(self, text: str) -> Iterator[int]:
        """Where a stand-in breaks every spelling: within the shortest at each beginning."""
        for found in self._beginning.finditer(text):
            yield found.start() + self._place_in(found[1])

    @staticmethod
    @cache
    def _place_in(spelling: str) -> int:
        """The last letter behind the first character, or else a sign that no filter looks for."""
        backwards = range(len(spelling) - 1, 0, -1)
        letters = (at for at in backwards if _is_letter(spelling[at]))
        signs = (
            at for at in backwards if spelling[at] not in "<>&'\"" and not spelling[at].isalnum()
        )
        return next(chain(letters, signs, backwards))


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for pair in value.items():
                yield from chain.from_iterable(map(_texts, pair))
        case list():
            yield from chain.from_iterable(map(_texts, value))


def _is_letter(char: str) -> bool:
    return char.isascii() and char.isalpha()


def _small(char: str) -> str:
    return char.lower() if _is_letter(char) else char
