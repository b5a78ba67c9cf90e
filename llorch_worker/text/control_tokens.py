"""Which tokens are control tokens, where a file's own types of tokens are wrong.

A control token has no text, and no user can spell it. Converters often type end-of-turn tokens as
text: they would appear in answers, and a user's text could hold them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from llorch_worker.contract import InvalidRequest
from llorch_worker.text.chat_templates import ChatTemplates

logger = logging.getLogger(__name__)

_END_NAMES = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"),
    }
)
"""Tokens that end an answer wherever they exist, as in llama.cpp."""
_END_NAMES_OF_CONTROL = frozenset({"</s>", "<eos>"})
"""Those that end one if the file makes them control tokens; in Gemma's vocabulary ``</s>`` is a tag
of HTML."""
_OTHER_NAMES = frozenset(
    {
        *("<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        "<start_of_turn>",
    }
)

_SHAPE = re.compile(r"(?!<0x)_?<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Any spelling like those of control tokens, but no byte token."""
_PIPED = re.compile(r"<[|｜][^<>\s]+?[|｜]>")
_QUESTION, _ANSWER = "Quagga?", "Axolotl."


class Vocabulary(Protocol):
    def token_to_id(self, token: str, /) -> int | None: ...

    def id_to_token(self, token_id: int, /) -> str | None: ...


@dataclass(frozen=True)
class AroundTurns:
    """What a chat template writes ``before`` the last question of a small chat, and ``after`` the
    answer."""

    before: str = ""
    after: str = ""


FindAroundTurns = Callable[[ChatTemplates], AroundTurns]


@dataclass(frozen=True)
class ControlTokens:
    """``spellings``: those of all control tokens. ``turn_end``: what ends an answer in chats."""

    spellings: frozenset[str]
    turn_end: str | None

    def ends(self, special_ids: Mapping[str, int]) -> set[int]:
        """The tokens that end an answer whatever the files' settings name: by their spelling among
        the control tokens, or in the chat template."""
        names = _END_NAMES | _END_NAMES_OF_CONTROL | {self.turn_end}
        return {token_id for spelling, token_id in special_ids.items() if spelling in names}


def find_control_tokens(
    vocabulary: Vocabulary,
    around: AroundTurns,
    *,
    names: Iterable[str] = (),
    ids: Iterable[int] = (),
) -> ControlTokens:
    """The control tokens by their ``names``, by their ``ids``, by well-known names, and by what the
    chat template writes around the turns of a chat.

    An id may also be that of plain text, such as a line feed, which stays text.
    """
    end = _SHAPE.match(around.after)
    turn_end = end.group() if end and vocabulary.token_to_id(end.group()) is not None else None
    found = {*names, *_END_NAMES, *_OTHER_NAMES, *_PIPED.findall(around.before)}
    found.update(
        spelling
        for token_id in ids
        if (spelling := vocabulary.id_to_token(token_id)) and _SHAPE.fullmatch(spelling)
    )
    if turn_end is not None:
        found.add(turn_end)
    return ControlTokens(
        frozenset(spelling for spelling in found if vocabulary.token_to_id(spelling) is not None),
        turn_end,
    )


def around_turns(templates: ChatTemplates) -> AroundTurns:
    """Renders a small chat, in this process."""
    if not templates.named:
        return AroundTurns()
    turns = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _QUESTION},
    ]
    try:
        text = templates.render(turns)
    except InvalidRequest as error:
        logger.warning("a plain chat is refused: %s", error.faults[0].rule)
        return AroundTurns()
    return AroundTurns(text.rpartition(_QUESTION)[0], text.partition(_ANSWER)[2].lstrip())
