"""Tokens on the terminal as they come."""

from __future__ import annotations

from llorch_worker.cli.terminal.screen import Screen, harmless
from llorch_worker.cli.terminal.wrapping import WordWrap
from llorch_worker.contract import Event, GenerationResult, Tokens
from llorch_worker.contract.quantities import counted

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


class StoryPrinter:
    """Prints the texts of one job: the first choice live, the others when it is over.

    ``opening`` (the prompt) is put before a text only where a person looks: into a pipe goes what
    was generated and nothing else.
    """

    def __init__(self, screen: Screen, *, choices: int = 1, opening: str | None = None) -> None:
        self._screen = screen
        self._choices = choices
        console = screen.out
        self._styled = console.is_terminal and not console.is_dumb_terminal
        self._opening = opening if self._styled else None
        self._write = WordWrap(screen.write_raw).push if self._styled else screen.write_raw
        self._kept: dict[int, list[str]] = {}
        self._begun = False
        self._at_line_start = True

    def show(self, event: Event) -> None:
        """Print what ``event`` adds."""
        if self._screen.as_json or not isinstance(event, Tokens):
            return
        if event.choice != 0:
            self._kept.setdefault(event.choice, []).append(event.text)
            return
        if not self._begun:
            self._begin(0)
        self._print(event.text)

    def show_result(self, result: GenerationResult) -> None:
        """Print all texts of a job that has ended."""
        self._choices = len(result.choices)
        for choice in result.choices:
            self.show(Tokens(choice=choice.index, index=0, ids=(), text=choice.text))
        self.end()

    def end(self) -> None:
        """Close the line, and print the other choices."""
        if self._screen.as_json:
            return
        self._break_line()
        for choice in sorted(self._kept):
            self._begin(choice)
            self._print("".join(self._kept[choice]))
            self._break_line()
        self._kept.clear()

    def _begin(self, choice: int) -> None:
        if choice == 0:
            self._begun = True
        if self._choices > 1:
            self._screen.out.print(f"── {choice + 1} of {self._choices} ──", style="dim")
        if self._opening:
            self._screen.write_raw(_BOLD)
            self._print(self._opening)
            self._screen.write_raw(_PLAIN)

    def _print(self, text: str) -> None:
        if text:
            self._write(harmless(text) if self._styled else text)
            self._at_line_start = text.endswith("\n")

    def _break_line(self) -> None:
        if not self._at_line_start:
            self._print("\n")


def summary_line(result: GenerationResult) -> str:
    """One line on how a job went: tokens, speed, first token, reason of its end."""
    timings = result.timings
    tokens = result.usage.completion
    total_ms = timings.prefill_ms + timings.decode_ms
    speed = f"{tokens / total_ms * 1000:.0f}/s" if total_ms > 0 else "at once"
    reasons = ", ".join(dict.fromkeys(choice.finish_reason for choice in result.choices))
    return (
        f"{result.model}: {counted(tokens, 'token')}, {speed}, "
        f"first after {timings.first_token_ms:.0f} ms, "
        f"{reasons}, seed {result.seed}"
    )
