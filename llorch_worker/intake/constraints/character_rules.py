"""A grammar by character: rules of which every terminal is one character, and their form in Lark.

llguidance's lexer takes the longest match of a terminal. With terminals of one character it has no
choice: the parser follows all ways to read a text, and the text may end after any of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

Range = tuple[int, int]
"""Codes of characters, both ends included."""

_LAST_CODE: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
"""Halves of characters. UTF-8 has none."""
_LAYERS: Final = 8
"""How deep names of names of classes are looked through."""
_MOST_UNITED: Final = 100_000
"""How many ranges of classes are united: 10 MiB and 0.1 s."""


@dataclass(frozen=True, slots=True)
class Item:
    """A symbol ``low`` to ``high`` times, or any number of times from ``low`` on."""

    symbol: str
    low: int = 1
    high: int | None = 1

    @property
    def is_single(self) -> bool:
        return (self.low, self.high) == (1, 1)

    def __str__(self) -> str:
        match self.low, self.high:
            case 1, 1:
                return self.symbol
            case 0 | 1 as low, None:
                return self.symbol + "*+"[low]
            case 0, 1:
                return f"{self.symbol}?"
            case low, high:
                return f"{self.symbol}{{{low},{'' if high is None else high}}}"


Sequence = list[Item]


class CharacterRules:
    """The alternatives of each rule. A symbol is a rule, a class of characters or a token.

    A group is a rule without a name of the user's, which one item refers to.
    """

    def __init__(self) -> None:
        self._alternatives: dict[str, list[Sequence]] = {}
        self._classes: dict[tuple[Range, ...], str] = {}
        self._groups: set[str] = set()

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._alternatives

    def define(self, name: str, alternatives: list[Sequence]) -> None:
        """``name`` is in lower case, so that it is a rule in Lark, and begins with no "g"."""
        self._alternatives[name] = alternatives

    def group(self, alternatives: list[Sequence]) -> Item:
        """The item that refers to a new group."""
        name = f"g{len(self._groups)}"
        self._groups.add(name)
        self._alternatives[name] = alternatives
        return Item(name)

    def repeated(self, item: Item, low: int, high: int | None) -> Item:
        """``item``, which may be a repetition itself, ``low`` to ``high`` times.

        Two repetitions within each other become one where they can: the parser would follow all
        ways to share a text between them.
        """
        if high == 0:
            return self.group([[]])
        alternatives = self._alternatives[item.symbol] if self._is_group(item) else []
        match alternatives:
            case [[inner]]:
                item = inner
        if item.low == 0:
            most = None if item.high is None or high is None else item.high * high
            return Item(item.symbol, 0, most)
        if item.is_single:
            if high is None and any(map(_may_be_empty, alternatives)):
                # (a* b?)* is (a | b)*.
                low, parts = 0, [each for each in alternatives if not _may_be_empty(each)]
                for each in filter(_may_be_empty, alternatives):
                    parts += [[replace(part, low=1, high=1)] for part in each]
                item = self.group(parts)
            return replace(item, low=low, high=high)
        if item.low == 1 and item.high is None:
            return Item(item.symbol, low, None)
        return replace(self.group([[item]]), low=low, high=high)

    def character(self, ranges: Iterable[Range], *, negated: bool = False) -> Item:
        """One character that is, or is not, within one of ``ranges``.

        Raises ValueError if no character of Unicode is.
        """
        excluded = list(ranges) if negated else _outside(ranges)
        allowed = tuple(_outside([*excluded, _SURROGATES]))
        if not allowed:
            raise ValueError("no character of Unicode is meant here")
        return Item(self._classes.setdefault(allowed, f"T{len(self._classes)}"))

    def _is_group(self, item: Item) -> bool:
        return item.is_single and item.symbol in self._groups

    def lark(self, start: str) -> str:
        """The grammar of the texts that ``start`` describes.

        Raises ValueError if there are none that end.
        """
        self._drop_the_endless()
        if start not in self._alternatives:
            raise ValueError(f"{start} describes only texts that never end")
        for name in [name for name in self._alternatives if name not in self._groups]:
            self._repeat_instead_of_ending_with(name)
        self._unite_classes()
        return "\n".join([f"start: {start}", *self._lines(start)])

    def _drop_the_endless(self) -> None:
        """Drops alternatives that no finite text fits. A text that had begun one could not end."""
        missing: dict[int, int] = {}
        """How many symbols each alternative still waits for."""
        waiting: dict[str, list[tuple[str, Sequence]]] = defaultdict(list)
        ending: set[str] = set()
        due: list[str] = []
        for name, alternatives in self._alternatives.items():
            for sequence in alternatives:
                needed = {item.symbol for item in sequence if item.low and item.symbol in self}
                missing[id(sequence)] = len(needed)
                for symbol in needed:
                    waiting[symbol].append((name, sequence))
                if not needed:
                    due.append(name)
        while due:
            name = due.pop()
            if name not in ending:
                ending.add(name)
                for user, sequence in waiting[name]:
                    missing[id(sequence)] -= 1
                    if not missing[id(sequence)]:
                        due.append(user)
        self._alternatives = {
            name: [
                [item for item in sequence if item.symbol in ending or item.symbol not in self]
                for sequence in alternatives
                if not missing[id(sequence)]
            ]
            for name, alternatives in self._alternatives.items()
            if name in ending
        }

    def _repeat_instead_of_ending_with(self, name: str) -> None:
        """Makes ``name``, if it ends with itself (``a: b a | c``), a repetition: ``a: b* c``.

        Each round of the former makes the parser slower, until it gives up.
        """
        repeated, ends = self._repeated_and_ends(name, name)
        if repeated:
            again = self.group(repeated)
            self._alternatives[name] = [[replace(again, low=0, high=None), *end] for end in ends]

    def _repeated_and_ends(self, name: str, part: str) -> tuple[list[Sequence], list[Sequence]]:
        """The alternatives of ``part`` that end with ``name``, without that, and the others."""
        repeated: list[Sequence] = []
        ends: list[Sequence] = []
        for sequence in self._alternatives[part]:
            match sequence:
                case [*start, Item(symbol, 1, 1)] if symbol == name:
                    repeated.append(start)
                case [*start, Item(symbol, 0 | 1 as low, 1)] if symbol in self._groups:
                    inner_repeated, inner_ends = self._repeated_and_ends(name, symbol)
                    if not inner_repeated:
                        ends.append(sequence)
                        continue
                    repeated.append([*start, self.group(inner_repeated)])
                    if inner_ends:
                        ends.append([*start, self.group(inner_ends)])
                    if low == 0:
                        ends.append(start)
                case _:
                    ends.append(sequence)
        return repeated, ends

    def _unite_classes(self) -> None:
        """Makes one class of each choice between classes, and uses it instead of the rule.

        The fewer terminals may come next, the more of a mask the parser takes from its cache.
        """
        ranges = {name: allowed for allowed, name in self._classes.items()}
        same: dict[str, str] = {}
        """Rules that describe one character, and the class of each."""
        may_unite = _MOST_UNITED
        for _ in range(_LAYERS):
            known = len(same)
            for name, alternatives in self._alternatives.items():
                classes: dict[str, Sequence] = {}
                others: list[Sequence] = []
                for sequence in alternatives:
                    items = [
                        replace(item, symbol=same[item.symbol]) if item.symbol in same else item
                        for item in sequence
                    ]
                    match items:
                        case [Item(symbol, 1, 1)] if symbol in ranges:
                            classes[symbol] = items
                        case _:
                            others.append(items)
                size = sum(len(ranges[symbol]) for symbol in classes)
                if len(classes) > 1 and size <= may_unite:
                    may_unite -= size
                    characters = [each for symbol in classes for each in ranges[symbol]]
                    item = self.character(characters)
                    ranges[item.symbol] = tuple(characters)
                    classes = {item.symbol: [item]}
                self._alternatives[name] = [*classes.values(), *others]
                if len(classes) == 1 and not others:
                    (same[name],) = classes
            if len(same) == known:
                return

    def _lines(self, start: str) -> Iterator[str]:
        """The rules that ``start`` needs, and the classes."""
        seen = {start}
        due = [(start, self._spread_alternatives(start))]
        while due:
            name, alternatives = due.pop()
            branched, rests = self._branched(alternatives)
            spelt = (" ".join(map(str, sequence)) or '""' for sequence in branched)
            yield f"{name}: {' | '.join(spelt)}"
            seen.update(rests)
            due += rests.items()
            for symbol in (item.symbol for sequence in branched for item in sequence):
                if symbol not in seen:
                    seen.add(symbol)
                    if symbol in self:
                        due.append((symbol, self._spread_alternatives(symbol)))
        for allowed, name in self._classes.items():
            if name in seen:
                inner = "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in allowed)
                yield f"{name}: /[{inner}]/"

    def _spread_alternatives(self, name: str) -> list[Sequence]:
        return [list(self._spread(sequence)) for sequence in self._alternatives[name]]

    def _spread(self, sequence: Sequence) -> Iterator[Item]:
        """``sequence`` with the items of each group that comes once and leaves no choice."""
        for item in sequence:
            if self._is_group(item) and len(self._alternatives[item.symbol]) == 1:
                yield from self._spread(self._alternatives[item.symbol][0])
            else:
                yield item

    def _branched(
        self, alternatives: list[Sequence]
    ) -> tuple[list[Sequence], dict[str, list[Sequence]]]:
        """``a b | a c`` as ``a (b | c)``, and the groups that this makes.

        A list of many words is then read letter by letter.
        """
        alike: dict[Item | None, list[Sequence]] = defaultdict(list)
        for sequence in alternatives:
            alike[sequence[0] if sequence else None].append(sequence)
        branched: list[Sequence] = []
        groups: dict[str, list[Sequence]] = {}
        for ways in alike.values():
            columns = takewhile(lambda items: len(set(items)) == 1, zip(*ways, strict=False))
            shared = [items[0] for items in columns]
            rests = [rest for way in ways if (rest := way[len(shared) :])]
            if len(rests) < len(ways):
                rests.append([])
            if len(rests) > 1:
                group = self.group(rests)
                groups[group.symbol] = rests
                shared.append(group)
            branched.append(shared)
        return branched, groups


def _may_be_empty(sequence: Sequence) -> bool:
    return all(item.low == 0 for item in sequence)


def _outside(ranges: Iterable[Range]) -> list[Range]:
    """The codes that are in none of ``ranges``."""
    outside: list[Range] = []
    first = 0
    for low, high in sorted([*ranges, (_LAST_CODE + 1, _LAST_CODE + 1)]):
        if first < min(low, _LAST_CODE + 1):
            outside.append((first, min(low, _LAST_CODE + 1) - 1))
        first = max(first, high + 1)
    return outside
