"""Dead letters: messages that no worker will run again, kept with their reason and history."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field, ValidationError
from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimTerms
from llorch_worker.broker.messages.message import read_task
from llorch_worker.broker.queues import model_of
from llorch_worker.broker.scripts import as_bytes, run_script

PAGE_LETTERS = 20
"""They may be as long as prompts."""
MALFORMED = "malformed"
EXHAUSTED = "attempts exhausted"
"""As ``lua/parts/take.lua`` writes it. Other reasons say why workers refused the message."""

Retried = Literal["retried", "gone", "under way", "ended"]
"""``gone``: the letter has been retried or dropped; ``under way``: the job already waits or runs
again; ``ended``: the job succeeded or was cancelled."""


@dataclass(frozen=True)
class DeadLetter:
    """A message and why it is dead. Its ``repr`` hides the message, which holds a prompt."""

    id: str
    """The job's id, or ``malformed-...`` if the message names none."""
    reason: str
    list_key: str
    attempts: int
    history: tuple[tuple[str, int], ...]
    """The workers that claimed the job, in order, with unix times in ms by Redis' clock."""
    died_ms: int
    message: str = field(repr=False)
    """The message that the producer pushed; bytes that are not UTF-8 are replaced."""
    message_bytes: int
    """Of the message, also of one that is too large to be kept and is empty here."""
    raw: str = field(repr=False)
    """The letter as Redis stores it."""
    number: str

    @property
    def model(self) -> str:
        return model_of(self.list_key)

    @property
    def retriable(self) -> bool:
        """Whether a retry can help. A message that workers refused would be refused again."""
        return self.reason == EXHAUSTED and self.is_kept

    @property
    def is_kept(self) -> bool:
        """Whether Redis has the message. It keeps none that is larger than its owner's share."""
        return self.message != "" or self.message_bytes == 0

    def lost_workers(self, living: Mapping[str, float]) -> list[str]:
        """The workers that died with the job, in order. ``living``: since when, as Unix time, each
        living worker lives. The last one that had a job which was refused only refused it."""
        deaths = self.history if self.reason == EXHAUSTED else self.history[:-1]
        return [name for name, at_ms in deaths if living.get(name, math.inf) * 1e3 > at_ms]

    def body(self, most_bytes: int) -> Any:
        """The message's body, prompt included; None if it is not JSON of at most ``most_bytes``. A
        task's body is ``[args, kwargs, options]``."""
        task = read_task(self.message, most_bytes)
        return None if task is None else task[1]


class _Stored(BaseModel):
    """As ``lua/parts/letters.lua`` writes it."""

    id: str
    reason: str
    list_key: str = Field(alias="list")
    attempts: float
    history: str
    at_ms: float
    message: str
    message_bytes: float | None = None


def bury(client: Redis, claim: Claim, reason: str, terms: ClaimTerms) -> bool:
    """Keeps a claim's message as a dead letter; the caller ends the claim. False if it was lost."""
    letter = claims.letter_of(claim, terms)
    return bool(run_script(client, "bury", [claim.job_id, claim.fence, reason, *letter]))


def refuse(client: Redis, claim: Claim, reason: str, error: Exception, terms: ClaimTerms) -> None:
    """Buries a claim's message, stores ``error`` as the job's result and ends the claim.

    If the connection breaks in between, the message is delivered and refused again, and is still
    one letter. Not a transaction: a server at maxmemory refuses them. Nothing happens if the claim
    was lost.
    """
    bury(client, claim, reason, terms)
    claims.fail(client, claim, error, terms)


def count(client: Redis) -> int:
    return int(client.llen(keys.DEAD))


def letters(client: Redis) -> Iterator[DeadLetter]:
    """All letters, the newest first; ``client`` decodes replies."""
    start = 0
    while page := client.lrange(keys.DEAD, start, start + PAGE_LETTERS - 1):
        numbers = [str(entry).partition(" ")[0] for entry in page]
        for number, raw in zip(numbers, client.hmget(keys.LETTERS, numbers), strict=True):
            # Gone meanwhile.
            if raw is not None:
                yield _read(number, str(raw))
        start += PAGE_LETTERS


def version(client: Redis) -> str:
    """A text that differs whenever the list of letters has changed. The console asks for it with
    each reading of the fleet."""
    # A new letter changes the head, and one that goes the length.
    return f"{client.llen(keys.DEAD)} {client.lindex(keys.DEAD, 0)!r}"


def find(client: Redis, letter_id: str) -> DeadLetter | None:
    """The newest letter with this id."""
    return find_all(client, [letter_id]).get(letter_id)


def find_all(client: Redis, letter_ids: Collection[str]) -> dict[str, DeadLetter]:
    """The newest letter of each id that has one."""
    found: dict[str, DeadLetter] = {}
    wanted = set(letter_ids)
    for letter in letters(client) if wanted else ():
        if letter.id in wanted:
            found.setdefault(letter.id, letter)
            if len(found) == len(wanted):
                break
    return found


def retry(client: Redis, letter: DeadLetter) -> Retried:
    """Puts the job at the tail of its queue with a full set of attempts, and removes its failure.

    The job continues from its journal if that has not expired. A requested cancel and a deadline
    still apply.
    """
    outcome: Retried = run_script(
        client, "retry", [as_bytes(letter.raw), uuid4().hex, letter.number]
    )
    return outcome


def drop(client: Redis, letter: DeadLetter) -> bool:
    """Deletes a letter; its job stays failed. False if the letter was already gone."""
    return bool(run_script(client, "drop_letter", [letter.number]))


def _read(number: str, raw: str) -> DeadLetter:
    in_bytes = as_bytes(raw)
    text = in_bytes.decode(errors="replace")
    try:
        stored = _Stored.model_validate_json(text, strict=True)
    except ValidationError:
        fields: dict[str, Any] = {"id": "", "list": "", "attempts": 0, "history": "", "at_ms": 0}
        stored = _Stored(**fields, reason=MALFORMED, message=text)
    return DeadLetter(
        id=stored.id or f"{MALFORMED}-{hashlib.sha1(in_bytes).hexdigest()[:12]}",
        reason=stored.reason,
        list_key=stored.list_key,
        attempts=int(stored.attempts),
        history=_history(stored.history),
        died_ms=int(stored.at_ms),
        message=stored.message,
        message_bytes=int(stored.message_bytes or len(stored.message.encode())),
        raw=raw,
        number=number,
    )


def _history(stored: str) -> tuple[tuple[str, int], ...]:
    claims = [line.rpartition(" ") for line in stored.splitlines()]
    return tuple((worker, int(at_ms)) for worker, _, at_ms in claims if at_ms.isdecimal())
