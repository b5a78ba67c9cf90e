"""``llorch dead``: jobs that nobody will run by themselves, until an operator decides."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, RedisOption, settings_from
from llorch_worker.cli.status import ago
from llorch_worker.cli.terminal.screen import Screen, harmless, json_text
from llorch_worker.contract.command_errors import FAILED, CommandError, usage_error
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from redis import Redis

    from llorch_worker.broker.dead_letters import DeadLetter

LISTED_LETTERS = 50

app = typer.Typer(
    help="Dead letters: jobs that lost every worker they ran on, and messages that are none.",
    no_args_is_help=True,
)

_WHY_NOT = {
    "malformed": "it is no message that a worker could read",
    "gone": "it was retried or dropped meanwhile",
    "under way": "the same job waits or runs already",
    "ended": "the job has ended well, or was cancelled",
}

LetterArgument = Annotated[str, typer.Argument(metavar="ID", help="What llorch dead list shows.")]
OneLetterArgument = Annotated[
    str | None, typer.Argument(metavar="ID", help="What llorch dead list shows.")
]


@app.command("list")
def list_letters(
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="The most to show, newest first.")
    ] = LISTED_LETTERS,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show dead letters, the newest first: sizes and reasons, never prompts."""
    screen = Screen(as_json=as_json)
    with _redis(settings_from(redis_url=redis)) as client:
        from llorch_worker.broker import dead_letters

        total = dead_letters.count(client)
        letters = list(islice(dead_letters.letters(client), limit))
    if as_json:
        screen.document({"total": total, "dead_letters": [_summary(it) for it in letters]})
        return
    for letter in letters:
        screen.out.print(
            f"{harmless(letter.id)}  {letter.model}  {counted(letter.attempts, 'attempt')}  "
            f"{human_bytes(letter.message_bytes)}  {_age(letter)}\n  {harmless(letter.reason)}",
            markup=False,
            soft_wrap=True,
        )
    if not letters:
        screen.out.print("No dead letters.")
    elif total > len(letters):
        screen.note(f"{total - len(letters):,} more; --limit shows them")


@app.command("show")
def show(
    letter_id: LetterArgument,
    message: Annotated[
        bool,
        typer.Option(
            "--message", help="Print the raw message and its decoded body, prompt included."
        ),
    ] = False,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter with its history; the message itself only with --message."""
    screen = Screen(as_json=as_json)
    with _redis(settings_from(redis_url=redis)) as client:
        letter = _find(client, letter_id)
    if as_json:
        screen.document(
            _summary(letter)
            | {"history": [{"worker": who, "at": _iso(at_ms)} for who, at_ms in letter.history]}
            | ({"message": letter.message, "body": letter.body} if message else {})
        )
    elif message:
        _write_message(screen, letter)
    else:
        _show(screen, letter)


@app.command("retry")
def retry(
    letter_id: OneLetterArgument = None,
    every: Annotated[bool, typer.Option("--all", help="All that can be retried.")] = False,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a dead job back into its queue, with all its attempts.

    It goes on from the tokens it had. A job past its deadline ends with those.
    """
    screen = Screen(as_json=as_json)
    settings = settings_from(redis_url=redis)
    with _redis(settings) as client:
        from llorch_worker.broker import dead_letters

        outcomes = {}
        for letter in _chosen(client, letter_id, every=every):
            outcome = "malformed"
            if letter.retriable:
                outcome = dead_letters.retry(client, letter, stream_ttl_s=settings.stream_ttl_s)
            outcomes[letter.id] = outcome
    if not every:
        (outcome,) = outcomes.values()
        if outcome != "retried":
            raise CommandError("NOT_RETRIED", f"{letter_id} was not retried: {_WHY_NOT[outcome]}")
    retried = [it for it, outcome in outcomes.items() if outcome == "retried"]
    left = {it: outcome for it, outcome in outcomes.items() if outcome != "retried"}
    if as_json:
        screen.document({"retried": retried, "left": left})
    else:
        screen.out.print(f"{counted(len(retried), 'job')} put back into the queue.")
        for outcome, count in Counter(left.values()).items():
            screen.out.print(f"{counted(count, 'letter')} left: {_WHY_NOT[outcome]}.")


@app.command("drop")
def drop(
    letter_id: OneLetterArgument = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget a dead letter: its job stays failed, and its message is gone for good."""
    screen = Screen(as_json=as_json)
    with _redis(settings_from(redis_url=redis)) as client:
        from llorch_worker.broker import dead_letters

        chosen = _chosen(client, letter_id, every=every)
        dropped = [letter.id for letter in chosen if dead_letters.drop(client, letter)]
    if as_json:
        screen.document({"dropped": dropped})
    else:
        screen.out.print(f"{counted(len(dropped), 'letter')} dropped.")


@contextmanager
def _redis(settings: Settings) -> Iterator[Redis]:
    from llorch_worker.broker.connection import broker_errors, connect

    with broker_errors(settings.redis_url), connect(settings.redis_url) as client:
        yield client


def _chosen(client: Redis, letter_id: str | None, *, every: bool) -> list[DeadLetter]:
    from llorch_worker.broker import dead_letters

    if (letter_id is None) != every:
        raise usage_error("give either an ID or --all")
    if letter_id is None:
        # Before the first is touched: one that dies again meanwhile is not met twice.
        return list(dead_letters.letters(client))
    return [_find(client, letter_id)]


def _find(client: Redis, letter_id: str) -> DeadLetter:
    from llorch_worker.broker import dead_letters

    letter = dead_letters.find(client, letter_id)
    if letter is None:
        raise CommandError(
            "UNKNOWN_LETTER",
            f"no dead letter {letter_id[:80]!r}; llorch dead list shows what there is",
            FAILED,
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


def _show(screen: Screen, letter: DeadLetter) -> None:
    size = human_bytes(letter.message_bytes)
    lines = {
        "id": letter.id,
        "model": letter.model,
        "reason": letter.reason,
        "attempts": str(letter.attempts),
        "died": f"{_iso(letter.died_ms)} ({_age(letter)})",
        "message": f"{size}, prompt included: --message prints it",
        "retry": f"llorch dead retry {letter.id}" if letter.retriable else _WHY_NOT["malformed"],
    }
    for name, text in lines.items():
        screen.out.print(f"{name:<9} {harmless(text)}", markup=False, soft_wrap=True)
    for number, (worker, at_ms) in enumerate(letter.history, start=1):
        name = "history" if number == 1 else ""
        screen.out.print(f"{name:<9} {_iso(at_ms)}  {worker}", markup=False, soft_wrap=True)


def _write_message(screen: Screen, letter: DeadLetter) -> None:
    """As it lies in Redis, and on a line of its own the body, which is base64 there."""
    lines = [letter.message]
    if letter.body is not None:
        lines.append(json_text(letter.body))
    for line in lines:
        screen.write_raw((harmless(line) if sys.stdout.isatty() else line) + "\n")


def _age(letter: DeadLetter) -> str:
    return ago(time.time() - letter.died_ms / 1e3)


def _iso(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1e3, UTC).isoformat(timespec="seconds")
