"""``/console/api``: what the console's page asks. It may change with the page, so OpenAPI leaves it
out; scripts use ``llorch status`` and ``llorch dead``."""

from __future__ import annotations

import threading
import time
from itertools import islice
from typing import Annotated, Literal

from fastapi import Depends, Request, Response
from pydantic import BaseModel, Field
from redis import Redis
from redis.exceptions import RedisError

from llorch_worker.broker import dead_letters
from llorch_worker.broker.connection import connect_impatient
from llorch_worker.broker.ended_jobs import ended_jobs
from llorch_worker.broker.fleet import FleetReader
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.console.documents import (
    EndedJobs,
    FleetDocument,
    Letter,
    Letters,
    Session,
)
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.gateway import TheCaller, TheGateway
from llorch_worker.openai_api.shape import WholeBody

LISTED_JOBS = 50
LISTED_LETTERS = 100
FLEET_FRESH_S = 1.0

Outcome = dead_letters.Retried | Literal["malformed", "dropped"]


class Console:
    """What the routes share. Redis is read here as the command line reads it, so they are plain
    functions, which FastAPI runs in threads."""

    def __init__(self, redis_url: str) -> None:
        self.redis: Redis = connect_impatient(redis_url)
        self._reading = threading.Lock()
        self._fleet: FleetDocument | RedisError = RedisError("not read yet")
        self._read_at_s = float("-inf")
        self._reader = FleetReader(self.redis)

    def fleet(self) -> FleetDocument:
        """The fleet as it was at most a second ago, however many pages ask. Raises ``RedisError``,
        also if Redis did not answer then."""
        with self._reading:
            if time.monotonic() - self._read_at_s > FLEET_FRESH_S:
                try:
                    self._fleet = self._read()
                except RedisError as error:
                    self._fleet = error
                # Now, so that it also holds for those who waited meanwhile.
                self._read_at_s = time.monotonic()
            if isinstance(self._fleet, RedisError):
                raise self._fleet
            return self._fleet

    def _read(self) -> FleetDocument:
        fleet = self._reader.read()
        return FleetDocument.of(fleet, dead_letters.version(self.redis), time.time())

    def close(self) -> None:
        self.redis.close()


class ChosenLetters(WholeBody):
    """A body, and so JSON: a page of another origin cannot send it without asking first."""

    ids: list[str] = Field(min_length=1, max_length=LISTED_LETTERS)


class Outcomes(BaseModel):
    """What became of each letter. ``gone``: somebody else was faster."""

    outcomes: dict[str, Outcome]


# Coroutines, because FastAPI hands plain functions to a thread.


async def _console(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


async def operator(caller: TheCaller) -> None:
    """Raises ``HttpError`` 401, or 403 for a key that is not an operator's."""
    if not caller.operator:
        message = (
            "this key is not an operator's; its entry in the file of keys has no operator = true"
        )
        raise HttpError(403, "OPERATOR_NEEDED", message)


async def not_stored(response: Response) -> None:
    response.headers["Cache-Control"] = "no-store"


TheConsole = Annotated[Console, Depends(_console)]
router = Router(prefix="/console/api", include_in_schema=False, dependencies=[Depends(not_stored)])
operators = Router(dependencies=[Depends(operator)])


@router.get("/session")
async def session(request: Request, gateway: TheGateway) -> Session:
    """Who sends this header. An unknown key is an answer here, and no error."""
    try:
        caller = gateway.caller(request.headers)
    except HttpError:
        return Session(needs_key=True, signed_in=False)
    needs_key = gateway.own.keys is not None
    return Session(needs_key=needs_key, signed_in=True, name=caller.name, operator=caller.operator)


@operators.get("/fleet")
def fleet(console: TheConsole) -> FleetDocument:
    return console.fleet()


@operators.get("/jobs", response_model_exclude_none=True)
def jobs(console: TheConsole) -> EndedJobs:
    return EndedJobs(jobs=ended_jobs(console.redis, LISTED_JOBS))


@operators.get("/dead-letters")
def letters(console: TheConsole) -> Letters:
    # First, so that a letter that comes meanwhile makes another one.
    version = dead_letters.version(console.redis)
    newest = islice(dead_letters.letters(console.redis), LISTED_LETTERS)
    return Letters(
        total=dead_letters.count(console.redis),
        version=version,
        letters=[Letter.of(each) for each in newest],
    )


@operators.post("/dead-letters/retry")
def retry(chosen: ChosenLetters, console: TheConsole) -> Outcomes:
    """Puts jobs back into their queues, with all their attempts."""
    outcomes: dict[str, Outcome] = dict.fromkeys(chosen.ids, "gone")
    for letter in dead_letters.find_all(console.redis, chosen.ids).values():
        outcomes[letter.id] = (
            dead_letters.retry(console.redis, letter) if letter.retriable else "malformed"
        )
    return Outcomes(outcomes=outcomes)


@operators.post("/dead-letters/drop")
def drop(chosen: ChosenLetters, console: TheConsole) -> Outcomes:
    """Deletes letters for good. Their jobs stay failed."""
    outcomes: dict[str, Outcome] = dict.fromkeys(chosen.ids, "gone")
    for letter in dead_letters.find_all(console.redis, chosen.ids).values():
        if dead_letters.drop(console.redis, letter):
            outcomes[letter.id] = "dropped"
    return Outcomes(outcomes=outcomes)


router.include_router(operators)
