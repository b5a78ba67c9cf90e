"""``llorch dead``: dead letters, which wait for an operator's decision."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.command_line import command_line
from llorch_worker.cli.terminal.screen import Screen, harmless, json_text
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.contract.quantities import counted, human_bytes, human_time, iso_time
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from redis import Redis

    from llorch_worker.broker.jobs.dead_letters import DeadLetter

LISTED_LETTERS = 50

app = command_line(
    help="List, retry or drop dead letters: jobs that lost every worker they ran on, and "
    "malformed messages.",
    no_args_is_help=True,
)

_WHY_NOT = {
    "malformed": "no worker can run the message",
    "too large": "its message was too large to be kept",
    "gone": "it has been retried or dropped already",
    "under way": "the same job is already waiting or running",
    "ended": "the job succeeded or was cancelled",
}

_LETTER_ID = typer.Argument(metavar="ID", help="An id from llorch dead list.")
LetterArgument = Annotated[str, _LETTER_ID]
OptionalLetterArgument = Annotated[str | None, _LETTER_ID]


@app.command("list")
@settings_options("redis_url")
def list_letters(
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=10**9, help="Number of letters to show.")
    ] = LISTED_LETTERS,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest first: sizes and reasons, never prompts."""
    screen = Screen(as_json=as_json)
    with _redis(settings) as client:
        from llorch_worker.broker.jobs import dead_letters

        total = dead_letters.count(client)
        letters = list(islice(dead_letters.letters(client), limit))
    if as_json:
        screen.document({"total": total, "dead_letters": [_summary(it) for it in letters]})
        return
    for letter in letters:
        screen.line(
            f"{letter.id}  {letter.model}  {counted(letter.attempts, 'attempt')}  "
            f"{human_bytes(letter.message_bytes)}  {_age(letter)}"
        )
        screen.line(f"  {letter.reason}")
    if not letters:
        screen.line("No dead letters.")
    elif total > len(letters):
        screen.note(f"{total - len(letters):,} more: raise --limit to see them")


@app.command("show")
@settings_options("redis_url")
def show(
    letter_id: LetterArgument,
    message: Annotated[
        bool,
        typer.Option(
            "--message", help="Print the raw message and its decoded body, with the prompt."
        ),
    ] = False,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter and its history, and with --message the message itself."""
    screen = Screen(as_json=as_json)
    most_bytes = settings.max_message_bytes
    with _redis(settings) as client:
        letter = _find(client, letter_id)
    if as_json:
        screen.document(
            _summary(letter)
            | {"history": [{"worker": who, "at": _iso(at_ms)} for who, at_ms in letter.history]}
            | ({"message": letter.message, "body": letter.body(most_bytes)} if message else {})
        )
    elif message:
        _write_message(screen, letter, most_bytes)
    else:
        _show(screen, letter)


@app.command("retry")
@settings_options("redis_url")
def retry(
    letter_id: OptionalLetterArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Retry all that can be retried.")] = False,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Put a dead job back into its queue, with all its attempts.

    It continues after the tokens that it already has. A job past its deadline ends with them.
    """
    screen = Screen(as_json=as_json)
    outcomes: dict[str, str] = {}
    retried: list[str] = []
    with _telling(retried, "job", "put back into the queue"), _redis(settings) as client:
        from llorch_worker.broker.jobs import dead_letters

        for letter in _chosen(client, letter_id, every=every):
            outcome = "malformed" if letter.is_kept else "too large"
            if letter.retriable:
                outcome = dead_letters.retry(client, letter)
            outcomes[letter.id] = outcome
            if outcome == "retried":
                retried.append(letter.id)
    if not every:
        (outcome,) = outcomes.values()
        if outcome != "retried":
            raise CommandError("NOT_RETRIED", f"{letter_id} was not retried: {_WHY_NOT[outcome]}")
    left = {it: outcome for it, outcome in outcomes.items() if outcome != "retried"}
    if as_json:
        screen.document({"retried": retried, "left": left})
    else:
        screen.line(f"{counted(len(retried), 'job')} put back into the queue.")
        for outcome, count in Counter(left.values()).items():
            screen.line(f"{counted(count, 'letter')} left: {_WHY_NOT[outcome]}.")


@app.command("drop")
@settings_options("redis_url")
def drop(
    letter_id: OptionalLetterArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Drop all of them.")] = False,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Delete a dead letter for good. Its job stays failed."""
    screen = Screen(as_json=as_json)
    dropped: list[str] = []
    with _telling(dropped, "letter", "dropped"), _redis(settings) as client:
        from llorch_worker.broker.jobs import dead_letters

        for letter in _chosen(client, letter_id, every=every):
            if dead_letters.drop(client, letter):
                dropped.append(letter.id)
    if as_json:
        screen.document({"dropped": dropped})
    else:
        screen.line(f"{counted(len(dropped), 'letter')} dropped.")


@contextmanager
def _telling(done: list[str], noun: str, what: str) -> Iterator[None]:
    """If Redis fails, the error says how many were done before."""
    try:
        yield
    except BrokerUnavailable as error:
        if not done:
            raise
        raise type(error)(f"{counted(len(done), noun)} {what}, then: {error}") from error


@contextmanager
def _redis(settings: Settings) -> Iterator[Redis]:
    from llorch_worker.broker.connections.connection import broker_errors, connect

    with broker_errors(settings.redis_url), connect(settings.redis_url) as client:
        yield client


def _chosen(client: Redis, letter_id: str | None, *, every: bool) -> list[DeadLetter]:
    from llorch_worker.broker.jobs import dead_letters

    if (letter_id is None) != every:
        raise usage_error("give either an ID or --all")
    if letter_id is None:
        # Listed first, so that a job that dies again meanwhile is not retried twice.
        return list(dead_letters.letters(client))
    return [_find(client, letter_id)]


def _find(client: Redis, letter_id: str) -> DeadLetter:
    from llorch_worker.broker.jobs import dead_letters

    letter = dead_letters.find(client, letter_id)
    if letter is None:
        raise CommandError(
            "UNKNOWN_LETTER",
            f"no dead letter {letter_id[:80]!r}; llorch dead list shows all letters",
        )
    return letter


def _summary(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "model": letter.model,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "died_at": _iso(letter.died_ms),
        "message_bytes": letter.message_bytes,
        "retriable": letter.retriable,
    }


def _why_not(letter: DeadLetter) -> str:
    return _WHY_NOT["malformed" if letter.is_kept else "too large"]


def _show(screen: Screen, letter: DeadLetter) -> None:
    size = human_bytes(letter.message_bytes)
    lines = {
        "id": letter.id,
        "model": letter.model,
        "reason": letter.reason,
        "attempts": str(letter.attempts),
        "died": f"{_iso(letter.died_ms)} ({_age(letter)})",
        "message": f"{size}, with the prompt; --message prints it"
        if letter.is_kept
        else f"{size}, too large to be kept",
        "retry": f"llorch dead retry {letter.id}" if letter.retriable else _why_not(letter),
    }
    for name, text in lines.items():
        screen.line(f"{name:<9} {text}")
    for number, (worker, at_ms) in enumerate(letter.history, start=1):
        name = "history" if number == 1 else ""
        screen.line(f"{name:<9} {_iso(at_ms)}  {worker}")


def _write_message(screen: Screen, letter: DeadLetter, most_bytes: int) -> None:
    """The raw message, and on the next line its body, which is base64 in the message."""
    lines = [letter.message]
    if (body := letter.body(most_bytes)) is not None:
        lines.append(json_text(body))
    for line in lines:
        screen.write_raw((harmless(line) if sys.stdout.isatty() else line) + "\n")


def _age(letter: DeadLetter) -> str:
    return f"{human_time(time.time() - letter.died_ms / 1e3)} ago"


def _iso(unix_ms: int) -> str:
    return iso_time(unix_ms / 1e3, "seconds")
