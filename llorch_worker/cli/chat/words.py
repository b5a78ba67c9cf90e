"""What a conversation understands beside messages: ``/set`` and the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llorch_worker.cli.chat.conversation import Conversation
from llorch_worker.cli.chat.partner import Partner, Partners
from llorch_worker.cli.request_options import CONVERSATION_FIELDS
from llorch_worker.contract.command_errors import usage_error

FIELDS = tuple(CONVERSATION_FIELDS)


class Talk(Protocol):
    """What the words change."""

    conversation: Conversation
    partners: Partners
    partner: Partner

    def say(self, text: str) -> None: ...

    def sampling(self) -> str: ...

    def choose(self, model: str) -> None: ...


@dataclass(frozen=True)
class Word:
    """``run(talk, rest)`` does it, with what follows the word; False ends the conversation."""

    usage: str
    help: str
    run: Callable[[Talk, str], bool | None]


def run(talk: Talk, line: str) -> bool:
    """Does what a ``line`` that begins with a slash says. False: the conversation is to end.

    Raises:
        CommandError: there is no such word, or it cannot be done.
        LlorchError: a value breaks a rule, or a model cannot be had.
    """
    name, _, rest = line.partition(" ")
    word = WORDS.get(name.lower())
    if word is None:
        raise usage_error(f"{name} is unknown; there are {', '.join(WORDS)}")
    return word.run(talk, rest.strip()) is not False


def completions(served: list[str]) -> list[str]:
    """What the Tab key may complete."""
    return [
        *WORDS,
        *(f"/set {name} " for name in FIELDS),
        *(f"/model {name}" for name in served),
    ]


def _system(talk: Talk, rest: str) -> None:
    talk.conversation.system = rest or None
    talk.say("system message: set" if rest else "no system message")


def _clear(talk: Talk, _rest: str) -> None:
    talk.conversation.turns.clear()
    talk.say("forgotten: the next message begins a conversation")


def _model(talk: Talk, rest: str) -> None:
    if rest:
        talk.choose(rest)
        return
    served = talk.partners.served()
    talk.say(f"{talk.partner.name} answers; served: {', '.join(served) or 'none'}")


def _set(talk: Talk, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name and name not in FIELDS:
        raise usage_error(f"/set {name}: there are {', '.join(FIELDS)}")
    if name:
        talk.conversation.set(name, value.strip())
    talk.say(talk.sampling() or "as the model's default")


def _save(talk: Talk, rest: str) -> None:
    if not rest:
        raise usage_error("/save FILE: name a file, .md or .json")
    path = Path(rest).expanduser()
    talk.conversation.save(path)
    talk.say(f"saved: {path}")


def _help(talk: Talk, _rest: str) -> None:
    width = max(len(word.usage) for word in WORDS.values())
    for word in WORDS.values():
        talk.say(f"{word.usage:<{width}}  {word.help}")
    talk.say('Enter sends, Alt-Enter begins a line; """ begins and ends a long message.')
    talk.say("Ctrl-C or Esc stops an answer; Ctrl-D leaves.")


def _exit(_talk: Talk, _rest: str) -> bool:
    return False


WORDS = {
    "/system": Word("/system [TEXT]", "the system message; without TEXT there is none", _system),
    "/clear": Word("/clear", "forget the conversation", _clear),
    "/model": Word("/model [NAME]", "another model: served, a file or hf:OWNER/NAME", _model),
    "/set": Word("/set [FIELD [VALUE]]", "such as temperature 0.7; without VALUE: unset", _set),
    "/save": Word("/save FILE", "write the conversation as Markdown, or as JSON", _save),
    "/help": Word("/help", "this list", _help),
    "/exit": Word("/exit", "leave, as Ctrl-D does", _exit),
}
