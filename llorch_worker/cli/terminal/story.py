"""A job's texts on the terminal, as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from llorch_worker.cli.terminal.screen import Screen, harmless
from llorch_worker.cli.terminal.wrapping import WordWrap
from llorch_worker.contract import (
    Event,
    GenerationRequest,
    GenerationResult,
    JobResult,
    Restarted,
    Started,
    Tokens,
    Vectors,
)
from llorch_worker.contract.quantities import counted

if TYPE_CHECKING:
    from llorch_worker.client import Job

QUIET_S = 5.0
"""A silence after which somebody who reads a job's text hears why."""
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def follow(screen: Screen, job: Job[Any], *, request: GenerationRequest | None, live: bool) -> None:
    """Print the job's text, token by token if ``live``, else once it has ended; then a summary.

    ``request`` is None except in the command that submitted the job.

    Raises:
        LlorchError: the job failed or was cancelled.
    """
    opening = request.prompt if request is not None else None
    story = StoryPrinter(screen, choices=request.n if request else 1, opening=opening)
    if live and not screen.as_json:
        try:
            for event in _events(job):
                if event is None:
                    story.remark(
                        f"no token for {QUIET_S:.0f} s: the worker is busy, or it died and another "
                        "goes on within seconds"
                    )
                else:
                    story.show(event)
        finally:
            story.end()
        result = job.result()
    else:
        with screen.err.status(f"waiting for {job.id}") if screen.live else nullcontext():
            result = job.result()
        story.show_result(result)
    show_outcome(screen, result)


def show_outcome(screen: Screen, result: JobResult) -> None:
    """The result as a JSON document, or one line about it after the text."""
    if screen.as_json:
        screen.document(result.model_dump(mode="json", exclude_none=True))
        return
    seed = f", seed {result.seed}" if isinstance(result, GenerationResult) else ""
    screen.note(f"{result.model}: {outcome(result)}{seed}")


def outcome(result: JobResult) -> str:
    """How many tokens there are, how fast they came, and why the texts ended; of a job of texts,
    how many there are."""
    if not isinstance(result, GenerationResult):
        return repr(result).strip("<>")
    timings, tokens = result.timings, result.usage.completion
    reasons = ", ".join(dict.fromkeys(choice.finish_reason for choice in result.choices))
    if result.attempts > 1:  # The times are of the last attempt, the tokens of all.
        return f"{counted(tokens, 'token')}, {result.attempts} attempts, {reasons}"
    total_ms = timings.prefill_ms + timings.decode_ms
    speed = f"{tokens / total_ms * 1000:.0f}/s" if total_ms > 0 else "at once"
    first = f"first after {timings.first_token_ms:.0f} ms"
    return f"{counted(tokens, 'token')}, {speed}, {first}, {reasons}"


def _events(job: Job[Any]) -> Iterator[Event | None]:
    """What comes; None once in each silence of :data:`QUIET_S` after the job has begun."""
    from llorch_worker.client.stream import Position

    position = Position()
    begun = quiet = False
    while not position.ended:
        try:
            for entry in job.stream(position, QUIET_S):
                yield entry.event
                begun, quiet = True, False
        except TimeoutError:
            if begun and not quiet:
                yield None
            quiet = True


class StoryPrinter:
    """Prints the texts of one job: the first choice live, the others at the end.

    ``opening`` (the prompt) precedes each text only on a terminal, as does the thought, dimmed; a
    pipe gets only the generated text. Under ``--json`` nothing is printed.
    """

    def __init__(self, screen: Screen, *, choices: int = 1, opening: str | None = None) -> None:
        self._screen = screen
        self._choices = choices
        console = screen.out
        self._styled = console.is_terminal and not console.is_dumb_terminal
        self._opening = opening if self._styled else None
        self._write = WordWrap(screen.write_raw).push if self._styled else screen.write_raw
        self._kept: dict[int, list[Tokens]] = {}
        self._begun = False
        self._thinking = False
        self._at_line_start = True

    def remark(self, text: str) -> None:
        """Say something beside the text."""
        if self._styled:
            self._break_line()
        self._screen.note(text)

    def show(self, event: Event) -> None:
        """Print the text that ``event`` adds."""
        if isinstance(event, Vectors):
            self.remark(f"{event.index + event.count} of {event.total} texts")
            return
        if isinstance(event, Started):
            if self._begun:
                self.remark(f"{event.worker} goes on with it")
            return
        if isinstance(event, Restarted):
            self._kept.clear()
            if self._begun:
                self._break_line()
                self._screen.note("the model was replaced: the text begins again")
        if self._screen.as_json or not isinstance(event, Tokens):
            return
        if event.choice != 0:
            self._kept.setdefault(event.choice, []).append(event)
            return
        if not self._begun:
            self._begin(0)
        self._add(event)

    def show_result(self, result: JobResult) -> None:
        """Print all texts of a job that has ended; vectors and scores are for programs."""
        if not isinstance(result, GenerationResult):
            return
        self._choices = len(result.choices)
        for choice in result.choices:
            self.show(Tokens.of(choice))
        self.end()

    def end(self) -> None:
        """End the line, and print the other choices."""
        if self._screen.as_json:
            return
        self._break_line()
        for choice in sorted(self._kept):
            self._begin(choice)
            for event in self._kept[choice]:
                self._add(event)
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

    def _add(self, event: Tokens) -> None:
        if event.reasoning_content and self._styled:
            if not self._thinking:
                self._break_line()
                self._screen.write_raw(_DIM)
                self._thinking = True
            self._print(event.reasoning_content)
        if event.text and self._thinking:
            self._break_line()
            self._print("\n")
        self._print(event.text)

    def _print(self, text: str) -> None:
        if text:
            self._write(harmless(text) if self._styled else text)
            self._at_line_start = text.endswith("\n")

    def _break_line(self) -> None:
        """End the line, and with it a thought."""
        if self._thinking:
            self._screen.write_raw(_PLAIN)
            self._thinking = False
        if not self._at_line_start:
            self._print("\n")
