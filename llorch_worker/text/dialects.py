"""How models write calls of tools, as a table: one entry a dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """``mark``, ``before``, calls, ``after``, ``end_mark``: once around all calls, or around
    ``each``. Marks may be control tokens."""

    name: str
    evidence: tuple[str, ...] = ()
    """What a chat template of this dialect holds, all of it."""
    mark: str = ""
    before: str = ""
    after: str = ""
    end_mark: str = ""
    each: bool = False
    between: str = ", "
    head: str = '{"name": "%s", "arguments": '
    tail: str = "}"
    writes_mark: bool = True
    """Whether a forced call begins with the mark."""
    tools_in_system: bool = False
    """Whether templates read the tools from the system message, instead of a variable."""
    short_ids: bool = False
    """Whether templates refuse ids of calls that are not nine letters and digits."""

    def marks(self) -> tuple[str, ...]:
        """Spellings that may be control tokens."""
        inner = re.findall(r"\[[A-Z_]+\]", self.head)
        return tuple(filter(None, (self.mark, *inner, "[CALL_ID]" if inner else "", self.end_mark)))

    def pieces(self) -> tuple[str, str, str]:
        """What is written before the first call, between two, and after the last."""
        opening = (self.mark if self.writes_mark else "") + self.before
        closing = self.after + self.end_mark
        between = closing + self.between + opening if self.each else self.between
        return opening, between, closing

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """The text of calls, each a name and its arguments as JSON."""
        opening, between, closing = self.pieces()
        spelt = [self.head % name + arguments + self.tail for name, arguments in calls]
        return opening + between.join(spelt) + closing


LLAMA3 = Dialect(
    name="llama3",
    mark="<|python_tag|>",
    writes_mark=False,
    head='{"name": "%s", "parameters": ',
    between="; ",
)
HERMES = Dialect(
    name="hermes",
    evidence=("<tool_call>",),
    mark="<tool_call>",
    before="\n",
    after="\n",
    end_mark="</tool_call>",
    each=True,
    between="\n",
)
"""Qwen's and SmolLM3's, too."""
MISTRAL = Dialect(
    name="mistral",
    evidence=("[TOOL_CALLS]", "[ARGS]"),
    mark="[TOOL_CALLS]",
    each=True,
    between="",
    head="%s[ARGS]",
    tail="",
    short_ids=True,
)
MISTRAL_LIST = Dialect(
    name="mistral-list",
    evidence=("[TOOL_CALLS]",),
    mark="[TOOL_CALLS]",
    before="[",
    after="]",
    short_ids=True,
)
"""Mistral's before 2025."""
PHI = Dialect(
    name="phi",
    evidence=("<|/tool|>",),
    mark="<|tool_call|>",
    before="[",
    after="]",
    end_mark="<|/tool_call|>",
    tools_in_system=True,
)
GRANITE = Dialect(
    name="granite",
    evidence=("<|tool_call|>",),
    mark="<|tool_call|>",
    before="[",
    after="]",
)
GENERIC = Dialect(name="generic", before='{"tool_calls": [', after="]}")
"""For templates without a place for tools."""

DIALECTS = (MISTRAL, MISTRAL_LIST, PHI, GRANITE, HERMES, LLAMA3, GENERIC)


def dialect_of(template: str | None) -> Dialect:
    """That of a template which shows tools: the first whose evidence it holds, or Llama 3's."""
    found = (d for d in DIALECTS if d.evidence and all(e in (template or "") for e in d.evidence))
    return next(found, LLAMA3)


_OPENERS = ("", "[", '{"tool_calls":[')
_TYPES = ("", '"type":"function",')
_KEYS = ("arguments", "parameters")


class Heads:
    """Recognises how a call of one of ``names`` begins, up to its arguments: as JSON, alone or in a
    list, whatever the dialect, or in the dialect's own form behind its mark."""

    def __init__(self, dialect: Dialect, names: Iterable[str]) -> None:
        names = tuple(names)
        self._spelt = tuple(self._spellings(names))
        any_name = "|".join(map(re.escape, names))
        self._json = re.compile(
            r'\s*(?:\{\s*"tool_calls"\s*:\s*\[\s*|\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
            rf'"name"\s*:\s*"({any_name})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
        )
        self._own: re.Pattern[str] | None = None
        self._own_spelt: tuple[str, ...] = ()
        if dialect.head.startswith("%s"):
            args = dialect.head.removeprefix("%s")
            self._own = re.compile(
                rf"\s*({any_name})(?:\[CALL_ID\][^\[{{]*)?{re.escape(args)}\s*(?=\{{)"
            )
            self._own_spelt = tuple(f"{name}{args}{{" for name in names)

    def match(self, text: str, *, marked: bool) -> tuple[str, int, bool] | None:
        """The name, where the arguments begin, and whether a brace ends the call after them."""
        if found := self._json.match(text):
            return found[1], found.end(), True
        if marked and self._own is not None and (found := self._own.match(text)):
            return found[1], found.end(), False
        return None

    def may_follow(self, text: str, *, marked: bool) -> bool:
        """Whether ``text`` may be the beginning of such a head."""
        begun = "".join(text.split())
        if any(each.startswith(begun) for each in self._spelt):
            return True
        if not marked or self._own is None:
            return False
        bare, call_id, rest = begun.partition("[CALL_ID]")
        begun = bare + rest[rest.find("[") :] if "[" in rest else bare
        if call_id and "[" not in rest:
            return any(each.startswith(bare + "[") for each in self._own_spelt)
        return any(
            each.startswith(begun) or each.replace("[ARGS]", "[CALL_ID]").startswith(begun)
            for each in self._own_spelt
        )

    def named(self, text: str, *, marked: bool) -> bool:
        """Whether ``text`` has the name of a function already, at the place of a head's."""
        begun = "".join(text.split())
        own = self._own_spelt if marked else ()
        named = [each[: each.rindex(',"')] for each in self._spelt]
        return begun.startswith((*named, *(each[: each.index("[") + 1] for each in own)))

    @staticmethod
    def _spellings(names: Iterable[str]) -> Iterator[str]:
        """Every head without white space."""
        for name in names:
            for opener in _OPENERS:
                for kind in _TYPES:
                    for key in _KEYS:
                        yield f'{opener}{{{kind}"name":"{name}","{key}":{{'
