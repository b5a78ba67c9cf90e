"""The Lua scripts, called by name.

Each script is ``lua/<name>.lua`` after ``lua/prelude.lua`` and the files of ``lua/parts`` that its
first comment names. Redis defines each function at each call of a script, so a script gets no
others. The names of keys and queues are defined in Python. A script that only another room calls
lies there: ``gateway/admit`` is ``gateway/lua/admit.lua``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis import Redis
from redis.exceptions import NoScriptError, ResponseError

from llorch_worker.broker import keys, queues
from llorch_worker.broker.connections.connection import is_out_of_memory
from llorch_worker.broker.messages import message
from llorch_worker.contract import TASK_NAME, TEXT_TASKS

Argument = str | int | float | bytes
Reply = str | bytes
"""A string in a reply: str from our clients, bytes from kombu's and Celery's."""

_PARTS = re.compile("^-- Parts: (.+)$", re.MULTILINE)
"""Each file of ``lua/parts`` after those that it uses itself."""
_WORD = re.compile(r"\w+")
_WRITES_AT_MAXMEMORY = re.compile("^-- Writes at maxmemory.$", re.MULTILINE)
_ALLOW_WRITES = f"redis.call('PERSIST', '{keys.LEASES}')"
"""Redis refuses a script at ``maxmemory`` only if its first write may grow memory. This one cannot.
Claimed jobs must continue, because their ends make room. Only a script that was refused, and so has
written nothing, is sent again with this: it costs a command."""
_NAMES: dict[str, str | int | keys.Key] = {
    "CLASS": keys.SCORES_A_CLASS,
    "TEXTS": keys.SCORES_OF_TEXTS,
    "TEXTS_SUFFIX": queues.TEXTS_SUFFIX,
    "TASK": f'"{TASK_NAME}"',
    "TEXT_TASKS": " ".join(["", *TEXT_TASKS, ""]),
    "LEASES": keys.LEASES,
    "DEAD_LETTERS": keys.DEAD,
    "LETTERS": keys.LETTERS,
    "LETTERS_HELD": keys.LETTERS_HELD,
    "DEADLINES": keys.DEADLINES,
    "FOLLOW_UPS": keys.FOLLOW_UPS,
    "BATCH_LEASES": keys.BATCH_LEASES,
    "FILES_DUE": keys.FILES_DUE,
    "MODELS": keys.MODELS,
    "job_key": keys.job,
    "events_key": keys.events,
    "result_key": keys.result,
    "cancel_key": keys.cancel,
    "wake_key": keys.wake,
    "load_key": keys.load,
    "message_key": keys.message,
    "staged_key": keys.staged,
    "APART_BYTES": keys.APART_BYTES,
    "waiting_key": keys.waiting,
    "watch_key": keys.watch,
    "scheduled_key": keys.scheduled,
    "live_key": keys.live,
    "contexts_key": keys.contexts,
    "worker_key": keys.worker,
    "searched_key": keys.searched,
    "shares_key": keys.shares,
    "aged_key": keys.aged,
    "usage_key": keys.usage,
    "rates_key": keys.key_rates,
    "gateway_document_key": keys.gateway_document,
    "FULL_SUFFIX": keys.FULL_SUFFIX,
    "LOW_SUFFIX": queues.LOW_SUFFIX,
    "HIGH_SUFFIX": queues.HIGH_SUFFIX,
    "SUFFIX_MARKS": queues.HIGH_SUFFIX[0] + queues.STEP_SEPARATOR,
    "QUEUE_PREFIX": queues.QUEUE_PREFIX,
    "STEP_SEPARATOR": queues.STEP_SEPARATOR,
    "TENANT_HEADER": message.TENANT,
    "OWNER_HEADER": message.OWNER,
    "WORKER_MARK": queues.WORKER_MARK,
    # A pattern of Lua: a task's name in a message's headers, however its producer writes JSON.
    "TASK_HEADER": '"task"%s*:%s*"(llorch%.%l+)"',
    "TASKS": " ".join(["", TASK_NAME, *TEXT_TASKS, ""]),
}
"""What scripts get from Python: constants, and functions that make a key of an id."""


@cache
def source(name: str, db: int = 0, *, anyway: bool = False) -> str:
    """The whole script, for the database ``db``: all share their channels. ``anyway``: it also
    writes at maxmemory, if it may."""
    room, _, file = name.rpartition("/")
    script = _text(file, room or "broker")
    parts = [f"parts/{part}" for names in _PARTS.findall(script) for part in names.split(", ")]
    if anyway and _WRITES_AT_MAXMEMORY.search(script):
        script = f"{_ALLOW_WRITES}\n{script}"
    body = "\n".join([*map(_text, ("prelude", *parts)), script])
    return "\n".join([*_names(db, {*_WORD.findall(body)}), body])


def _text(file: str, room: str = "broker") -> str:
    return (files("llorch_worker") / room / "lua" / f"{file}.lua").read_text(encoding="utf-8")


def _names(db: int, used: Set[str]) -> Iterator[str]:
    """Those that a script uses: Lua has room for 200 in all."""
    for name, value in _NAMES.items():
        if name not in used:
            continue
        if isinstance(value, str):
            yield f"local {name} = '{value}'"
        elif isinstance(value, int):
            yield f"local {name} = {value}"
        else:
            yield _function(name, value("@"))
    yield _function("events_channel", keys.events_channel(db, "@"))


def _function(name: str, made: str) -> str:
    before, after = made.split("@")
    return f"local function {name}(id) return '{before}' .. id .. '{after}' end"


@cache
def digest(name: str, db: int = 0, *, anyway: bool = False) -> str:
    """The SHA-1 by which the server knows the script."""
    return hashlib.sha1(source(name, db, anyway=anyway).encode()).hexdigest()


def load(client: Redis, name: str) -> None:
    """Loads the script into the server, so that its digest is enough."""
    client.script_load(source(name, database(client)))


def database(client: Any) -> int:
    """The number of the database of a client or a pipeline."""
    return int(client.connection_pool.connection_kwargs.get("db") or 0)


def queue_script(
    pipe: Any, name: str, arguments: Sequence[Argument], lists: Sequence[str] = ()
) -> None:
    """Adds a call of a script to a pipeline; the server may answer ``NoScriptError``, and refuse it
    at maxmemory. ``lists`` are its ``KEYS``."""
    pipe.evalsha(*_call(digest(name, database(pipe)), arguments, lists))


def run_script(
    client: Redis, name: str, arguments: Sequence[Argument], lists: Sequence[str] = ()
) -> Any:
    """Runs ``lua/<name>.lua`` in one step; ``lists`` are its ``KEYS``.

    After a restart or a failover the server does not know the digest; it then gets the source.
    """
    sent = _Sent(name, database(client))
    while True:
        try:
            return sent.send(client)(*_call(sent.script, arguments, lists))
        except ResponseError as error:
            sent.refused(error)


async def run_script_async(
    client: redis.asyncio.Redis,
    name: str,
    arguments: Sequence[Argument],
    lists: Sequence[str] = (),
) -> Any:
    """:func:`run_script` for asyncio."""
    sent = _Sent(name, database(client))
    while True:
        try:
            return await sent.send(client)(*_call(sent.script, arguments, lists))
        except ResponseError as error:
            sent.refused(error)


class _Sent:
    """How a script is sent: by its digest, until the server refuses that."""

    def __init__(self, name: str, db: int) -> None:
        self._name, self._db = name, db
        self._whole = self._anyway = False

    @property
    def script(self) -> str:
        return (source if self._whole else digest)(self._name, self._db, anyway=self._anyway)

    # redis-py's annotations cover all its clients at once.
    def send(self, client: Any) -> Callable[..., Any]:
        sends: Callable[..., Any] = client.eval if self._whole else client.evalsha
        return sends

    def refused(self, error: ResponseError) -> None:
        """Raises the error if there is no other way to send it."""
        if isinstance(error, NoScriptError) and not self._whole:
            self._whole = True
        elif is_out_of_memory(error) and self._may_write_anyway():
            self._whole, self._anyway = False, True
        else:
            raise error

    def _may_write_anyway(self) -> bool:
        return not self._anyway and source(self._name, anyway=True) != source(self._name)


def _call(script: str, arguments: Sequence[Argument], lists: Sequence[str]) -> tuple[Any, ...]:
    """The arguments of ``EVAL`` or ``EVALSHA``; ``script`` is the source or the digest."""
    return script, len(lists), *lists, *arguments


def text(reply: Reply) -> str:
    return reply.decode() if isinstance(reply, bytes) else reply


def as_bytes(reply: Reply) -> bytes:
    return reply.encode(errors="surrogateescape") if isinstance(reply, str) else reply
