"""What a person types: in a terminal with history and editing, or line by line from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyPressEvent

QUOTES = '"""'
"""Begins and ends an input of several lines."""
PROMPT = "› "


class Typed:
    """Inputs from the terminal. Enter sends; Alt-Enter begins a line, as does Enter within
    quotes. Arrows and Ctrl-R find earlier inputs, which a file of the user's keeps."""

    def __init__(self, words: Callable[[], Sequence[str]]) -> None:
        """``words``: what the Tab key completes."""
        self._session = _session(words)
        self.begun = ""
        """What was typed while nobody read: the next inputs, the last of which goes on."""

    def __iter__(self) -> Iterator[str]:
        while True:
            line, sent, self.begun = self.begun.partition("\n")
            try:
                typed = self._session.prompt(default=line, accept_default=bool(sent))
                yield without_quotes(typed)
            except KeyboardInterrupt:
                # Ctrl-C gives up what is typed, as in a shell.
                continue
            except EOFError:
                return


def piped() -> Iterator[str]:
    """The lines of stdin; what stands within quotes is one input."""
    lines = (line.rstrip("\r\n") for line in sys.stdin)
    for line in lines:
        text = line
        while _is_open(text):
            more = next(lines, None)
            if more is None:
                break
            text = f"{text}\n{more}"
        yield without_quotes(text)


def without_quotes(text: str) -> str:
    text = text.strip()
    if not text.startswith(QUOTES):
        return text
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def _is_open(text: str) -> bool:
    text = text.strip()
    return text.startswith(QUOTES) and not text[len(QUOTES) :].endswith(QUOTES)


def _session(words: Callable[[], Sequence[str]]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.newline()
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    return PromptSession(
        FormattedText([("bold", PROMPT)]),
        multiline=True,
        prompt_continuation="  ",
        history=_history(),
        completer=WordCompleter(words, sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=keys,
        placeholder=_placeholder,
        enable_open_in_editor=True,
    )


def _placeholder() -> FormattedText:
    from prompt_toolkit.application import get_app
    from prompt_toolkit.formatted_text import FormattedText

    # What Ctrl-C or Ctrl-D ends stays on the screen.
    hint = "" if get_app().is_done else "Say something, or /help"
    return FormattedText([("ansibrightblack", hint)])


def _history() -> History:
    """Earlier inputs, in a file that is the user's alone; else in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        file = Path(state) / "llorch" / "chat_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return InMemoryHistory()
    return FileHistory(str(file))
