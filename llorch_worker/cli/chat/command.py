"""The command: reads messages, and shows answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any

import typer

from llorch_worker.cli.chat import words
from llorch_worker.cli.chat.conversation import Conversation
from llorch_worker.cli.chat.partner import Answer, Partner, Partners
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.request_options import conversation_options
from llorch_worker.cli.terminal.interrupts import deaf, ending
from llorch_worker.cli.terminal.live_screen import is_screen
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import LlorchError, Restarted, Tokens
from llorch_worker.contract.command_errors import CommandError, explain
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.settings import Settings

_REFUSALS = (LlorchError, CommandError, BrokerUnavailable, OSError)


@settings_options("redis_url", "device", "dtype", "kv_dtype", "max_context")
@conversation_options
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A served model's name (default: the one that is served), or a .gguf file, a "
            "folder (with a /), hf:OWNER/NAME or demo, which need no Redis."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    *,
    settings: Settings,
    as_json: JsonOption = False,
    fields: dict[str, Any],
) -> None:
    """Talk to a model: several turns, with history and Markdown.

    Ctrl-C or Esc stops an answer, Ctrl-D leaves, and /help lists what else there is, such as
    /system, /model and /set temperature 0.7. What you type is kept for the arrow keys in
    ~/.local/state/llorch/chat_history.

    In a pipe each line is a message, or all between two lines of \"\"\". Stdout gets only the
    answers; with --json one document for each.
    """
    screen = Screen(as_json=as_json)
    conversation = Conversation(fields, system)
    if fields:
        conversation.set("", "")  # a wrong number should not cost the load of a model
    with closing(Partners(settings, screen)) as partners:
        talk = Talk(screen, conversation, partners, partners.find(model), settings)
        with closing(talk), ending():
            talk.run()


class Talk:
    """A conversation on a terminal or in a pipe."""

    def __init__(
        self,
        screen: Screen,
        conversation: Conversation,
        partners: Partners,
        partner: Partner,
        settings: Settings,
    ) -> None:
        self.conversation = conversation
        self.partners = partners
        self.partner = partner
        self._screen = screen
        self._settings = settings
        self._is_terminal = sys.stdin.isatty() and is_screen(screen.out) and not screen.as_json
        self._begun = ""

    def run(self) -> None:
        """Until the input ends. In a pipe the first refusal ends it.

        Raises:
            LlorchError, CommandError, BrokerUnavailable: in a pipe.
        """
        self.say(f"{self.partner.name}, {self.partner.where}. {self.sampling()}".strip())
        for line in self._lines():
            try:
                if line and not self._heed(line):
                    return
            except _REFUSALS as error:
                if not self._is_terminal:
                    raise
                explained = explain(error)
                assert explained is not None
                self._screen.error(explained[0])
            except KeyboardInterrupt:
                # Between two steps of ours: nothing is under way.
                if not self._is_terminal:
                    raise

    def close(self) -> None:
        self.partner.close()

    def say(self, text: str) -> None:
        """A remark beside the conversation."""
        self._screen.note(text)

    def sampling(self) -> str:
        """How answers are sampled."""
        return self.conversation.sampling(self.partner.config, self._settings)

    def choose(self, model: str) -> None:
        """Another answers from now on.

        Raises:
            LlorchError, CommandError: there is no such model; the last one stays.
        """
        found = self.partners.find(model)
        self.partner.close()
        self.partner = found
        self.say(f"{found.name}, {found.where}. {self.sampling()}".strip())

    def _lines(self) -> Iterable[str]:
        from llorch_worker.cli.chat import lines

        if not self._is_terminal:
            return lines.piped()
        typed = lines.Typed(lambda: words.completions(self.partners.served()))
        self._typed = typed
        return typed

    def _heed(self, line: str) -> bool:
        """False: the conversation is to end."""
        if line.startswith("/"):
            return words.run(self, line)
        turns = self.conversation.turns
        before = len(turns)
        turns.append({"role": "user", "content": line})
        text = ""
        try:
            text = self._answer()
        finally:
            # What was stopped stays as far as it came.
            if text:
                turns.append({"role": "assistant", "content": text})
            else:
                del turns[before:]
        return True

    def _answer(self) -> str:
        request, _ = self.conversation.request(self.partner.config, self._settings)
        answer = self.partner.ask(request)
        try:
            return self._show(answer) if self._is_terminal else self._write(answer)
        except (KeyboardInterrupt, SystemExit):
            # A second Ctrl-C must not keep it from being cancelled.
            with deaf():
                answer.cancel()
            raise

    def _write(self, answer: Answer) -> str:
        """The answer's text, as ``llorch generate`` writes it."""
        from llorch_worker.cli.terminal.story import StoryPrinter, show_outcome

        story = StoryPrinter(self._screen)
        try:
            for event in answer.events():
                story.show(event)
        finally:
            story.end()
        result = answer.result()
        show_outcome(self._screen, result)
        return result.text

    def _show(self, answer: Answer) -> str:
        """The answer's text, on the terminal; as much as came until somebody stopped it."""
        from llorch_worker.cli.terminal.markdown import MarkdownStream
        from llorch_worker.cli.terminal.story import outcome

        parts: list[str] = []
        with self._stoppable(answer) as stop, MarkdownStream(self._screen.out, "waiting") as shown:
            for event in answer.events():
                if isinstance(event, Restarted):
                    parts.clear()
                    shown.begin_again()
                    self.say("the model was replaced: the answer begins again")
                elif isinstance(event, Tokens):
                    parts.append(event.text)
                    if event.reasoning_content:
                        shown.think(event.reasoning_content)
                    if event.text:
                        shown.push(event.text)
        self.say("stopped" if stop else outcome(answer.result()))
        self._screen.out.print()
        return "".join(parts)

    @contextmanager
    def _stoppable(self, answer: Answer) -> Iterator[list[str]]:
        """Cancels the answer at Ctrl-C or Esc. Yields a list that is not empty after that."""
        from llorch_worker.cli.terminal.stop_key import stopped_by_esc

        stops: list[str] = []
        try:
            with stopped_by_esc() as typed:
                try:
                    yield stops
                except KeyboardInterrupt:
                    stops.append("stopped")
                    with deaf():
                        answer.cancel()
        finally:
            self._typed.begun += "".join(typed)
