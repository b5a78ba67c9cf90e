"""Dead letters: messages that nobody will run by themselves, kept with the reason and history."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.claims import MOST_DEAD_LETTERS, Claim
from llorch_worker.broker.queues import model_of
from llorch_worker.broker.scripts import run_script

PAGE_LETTERS = 100
MALFORMED = "malformed"
_NO_JSON = LookupError, TypeError, ValueError, AttributeError, RecursionError

Retried = Literal["retried", "gone", "under way", "ended"]
"""What a retry came to; ``gone``: somebody else retried or dropped the letter; ``under way``: the
same job waits or runs again; ``ended``: it has another end than a failure."""


@dataclass(frozen=True)
class DeadLetter:
    """One of them. Its ``repr`` shows nothing of the message: prompts are in it."""

    id: str
    """The job's id, or ``malformed-...`` where the message names none."""
    reason: str
    list_key: str
    attempts: int
    history: tuple[tuple[str, int], ...]
    """Who claimed the job and when, unix time in ms by Redis' clock, the first claim first."""
    died_ms: int
    """Unix time by Redis' clock."""
    message: str = field(repr=False)
    """As the producer pushed it; bytes that are no UTF-8 are replaced."""
    raw: str = field(repr=False)
    """The letter itself, which is also how scripts find it."""

    @property
    def model(self) -> str:
        return model_of(self.list_key)

    @property
    def message_bytes(self) -> int:
        return len(self.message.encode())

    @property
    def body(self) -> Any:
        """What the message carries, prompt included: ``[args, kwargs, options]`` where it is a
        task's; None where it is no JSON."""
        try:
            envelope = json.loads(self.message)
            body = envelope["body"]
            if envelope["properties"].get("body_encoding") == "base64":
                body = base64.b64decode(body)
            return json.loads(body)
        except _NO_JSON:
            return None

    @property
    def retriable(self) -> bool:
        """Whether a retry can help; what is malformed stays so."""
        return self.reason != MALFORMED


def bury(client: Redis, claim: Claim, reason: str) -> bool:
    """Keeps the message of a claim; ending the claim is the caller's. False if it was lost."""
    message = claim.message.decode("utf-8", "replace")
    return bool(
        run_script(
            client,
            "bury",
            [claim.job_id, claim.fence, reason, message, MOST_DEAD_LETTERS],
        )
    )


def count(client: Redis) -> int:
    """How many there are."""
    return int(client.llen(keys.DEAD))


def letters(client: Redis) -> Iterator[DeadLetter]:
    """All of them, the newest first. Readers' replies are str."""
    start = 0
    while page := client.lrange(keys.DEAD, start, start + PAGE_LETTERS - 1):
        for raw in page:
            yield _read(str(raw))
        start += PAGE_LETTERS


def find(client: Redis, letter_id: str) -> DeadLetter | None:
    """The newest with this id."""
    return next((letter for letter in letters(client) if letter.id == letter_id), None)


def retry(client: Redis, letter: DeadLetter, *, stream_ttl_s: int) -> Retried:
    """Puts the job at the tail of its queue, with all its attempts; its failure is taken back.

    It goes on from its journal, where that has not expired. A cancel that was asked for, and a
    deadline, still hold.
    """
    outcome: Retried = run_script(client, "retry", [letter.raw, stream_ttl_s])
    return outcome


def drop(client: Redis, letter: DeadLetter) -> bool:
    """Forgets a letter; its job stays failed. False if it was gone already."""
    return bool(client.lrem(keys.DEAD, 1, letter.raw))


def _read(raw: str) -> DeadLetter:
    stored: dict[str, Any] = json.loads(raw)
    return DeadLetter(
        id=stored["id"] or f"{MALFORMED}-{hashlib.sha1(raw.encode()).hexdigest()[:12]}",
        reason=stored["reason"],
        list_key=stored["list"],
        attempts=stored["attempts"],
        history=tuple(_claim_of(line) for line in stored["history"].splitlines()),
        died_ms=int(stored["at_ms"]),
        message=stored["message"],
        raw=raw,
    )


def _claim_of(line: str) -> tuple[str, int]:
    worker, _, at_ms = line.rpartition(" ")
    return worker, int(at_ms)
