"""How models write calls of tools, as a table: one entry a dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llorch_worker.text.keywords import as_keywords


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """``mark``, ``before``, calls, ``after``, ``end_mark``: once around all calls, or around
    ``each``. Marks may be control tokens."""

    name: str
    evidence: tuple[str, ...] = ()
    """What a chat template of this dialect holds, all of it."""
    mark: str = ""
    also: tuple[str, ...] = ()
    """Marks that models of this dialect write by mistake."""
    before: str = ""
    after: str = ""
    end_mark: str = ""
    each: bool = False
    between: str = ", "
    head: str = '{"name": "%s", "arguments": '
    tail: str = "}"
    writes_mark: bool = True
    """Whether a forced call begins with the mark."""
    keywords: bool = False
    """Whether arguments are written as in Python: ``head``, ``city="Bern", days=2``, ``tail``."""
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
        form = as_keywords if self.keywords else str
        spelt = [self.head % name + form(arguments) + self.tail for name, arguments in calls]
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
    also=("<tools>",),
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
OLMO3 = Dialect(
    name="olmo3",
    evidence=("<function_calls>",),
    mark="<function_calls>",
    end_mark="</function_calls>",
    between="\n",
    head="%s(",
    tail=")",
    keywords=True,
)
GENERIC = Dialect(name="generic", before='{"tool_calls": [', after="]}")
"""For templates without a place for tools."""

DIALECTS = (MISTRAL, MISTRAL_LIST, PHI, GRANITE, HERMES, OLMO3, LLAMA3, GENERIC)


def dialect_of(template: str | None) -> Dialect:
    """That of a template which shows tools: the first whose evidence it holds, or Llama 3's."""
    found = (d for d in DIALECTS if d.evidence and all(e in (template or "") for e in d.evidence))
    return next(found, LLAMA3)
