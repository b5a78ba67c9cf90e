"""The ledger: what was sent and what was seen, kept by the harness outside the broker."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN, CANCELLED, POISON, STOCK = "plain", "cancelled", "poison", "stock"
"""What a job promises. A plain one succeeds. A cancelled one succeeds or is revoked: a cancel may
come late. A poison one kills its workers and fails. A stock one runs once, in stock Celery."""

SCHEMA = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, seed INTEGER, tokens INTEGER, sent_s REAL,
    kind TEXT, due_s REAL, after TEXT
);
CREATE TABLE retries (job TEXT);
CREATE TABLE runs (job TEXT);
CREATE TABLE replies (command TEXT, refused INTEGER, reply TEXT);
CREATE TABLE entries (
    job TEXT, place INTEGER, entry TEXT, seen_s REAL, document TEXT, PRIMARY KEY (job, place)
);
CREATE TABLE withdrawn (job TEXT, entry TEXT);
CREATE TABLE results (job TEXT, seen_s REAL, document TEXT);
CREATE INDEX results_of_a_job ON results (job);
CREATE TABLE kills (number INTEGER PRIMARY KEY, kind TEXT, detail TEXT, worker TEXT, gone_s REAL);
CREATE TABLE held (kill INTEGER, job TEXT, place INTEGER);
CREATE INDEX held_by_a_worker ON held (kill);
"""


@dataclass(frozen=True)
class Job:
    """One job as sent: ``seed`` determines its tokens, and ``tokens`` is their number."""

    id: str
    seed: int
    tokens: int
    sent_s: float = 0.0
    kind: str = PLAIN
    due_s: float = 0.0
    """It must not start before."""
    after: tuple[str, ...] = ()
    """The first job of its chain, or the parts of the chord whose body it is."""


@dataclass(frozen=True)
class Reply:
    """A worker's reply to a control command; ``refused``: whether the command must be refused."""

    command: str
    refused: bool
    reply: Any


@dataclass(frozen=True)
class Entry:
    """One stream entry, and when it was first seen."""

    id: str
    seen_s: float
    document: str


@dataclass(frozen=True)
class Result:
    """The result backend's document from ``seen_s`` on."""

    seen_s: float
    document: str


@dataclass(frozen=True)
class Kill:
    """One strike against a worker; ``held``: the jobs that it then held, with the number of stream
    entries of each.

    ``gone_s``: when the worker died or was cut off.
    """

    kind: str
    detail: str
    worker: str
    gone_s: float
    held: Mapping[str, int]


class Ledger:
    """A ledger in SQLite, usable from any thread. Times are seconds of one monotonic clock."""

    def __init__(self, path: Path | None = None) -> None:
        """Without ``path``, the ledger is in memory."""
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            path or ":memory:", check_same_thread=False, isolation_level=None
        )
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("PRAGMA journal_mode = MEMORY")
        self._db.executescript(SCHEMA)
        self._places: dict[str, int] = {}
        self._last_result: dict[str, str] = {}
        self.last_activity_s = 0.0
        """When a stream or a result last changed."""

    def close(self) -> None:
        self._db.close()

    # Writing ---------------------------------------------------------------------------------

    def sent(self, job: Job) -> None:
        """Notes a job before it is sent, because only jobs noted here can count as lost."""
        self._write(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?)",
            job.id, job.seed, job.tokens, job.sent_s, job.kind, job.due_s, json.dumps(job.after),
        )  # fmt: skip

    def retried(self, job_id: str) -> None:
        """Notes that the job's dead letter was retried, so that it ends once more."""
        self._write("INSERT INTO retries VALUES (?)", job_id)

    def ran(self, job_id: str) -> None:
        """Notes a run of a stock task."""
        self._write("INSERT INTO runs VALUES (?)", job_id)

    def reply(self, reply: Reply) -> None:
        self._write(
            "INSERT INTO replies VALUES (?, ?, ?)",
            reply.command, reply.refused, json.dumps(reply.reply),
        )  # fmt: skip

    def entry(self, job_id: str, entry: Entry) -> None:
        """Notes a new stream entry."""
        place = self._places.get(job_id, 0)
        self._places[job_id] = place + 1
        self.last_activity_s = max(self.last_activity_s, entry.seen_s)
        self._write(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?)",
            job_id, place, entry.id, entry.seen_s, entry.document,
        )  # fmt: skip

    def withdrawn(self, job_id: str, entry_id: str) -> None:
        """Notes that an entry seen before has disappeared."""
        self._write("INSERT INTO withdrawn VALUES (?, ?)", job_id, entry_id)

    def result(self, job_id: str, result: Result) -> None:
        """Notes a document in the result backend; repeats are ignored."""
        if self._last_result.get(job_id) == result.document:
            return
        self._last_result[job_id] = result.document
        self.last_activity_s = max(self.last_activity_s, result.seen_s)
        self._write("INSERT INTO results VALUES (?, ?, ?)", job_id, result.seen_s, result.document)

    def kill(self, kill: Kill) -> None:
        with self._lock:
            cursor = self._db.execute(
                "INSERT INTO kills (kind, detail, worker, gone_s) VALUES (?, ?, ?, ?)",
                (kill.kind, kill.detail, kill.worker, kill.gone_s),
            )
            self._db.executemany(
                "INSERT INTO held VALUES (?, ?, ?)",
                [(cursor.lastrowid, job_id, place) for job_id, place in kill.held.items()],
            )

    # Reading ---------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        rows = self._read("SELECT * FROM jobs ORDER BY sent_s, rowid")
        return [Job(*(*values, tuple(json.loads(after)))) for *values, after in rows]

    def retries(self) -> Counter[str]:
        """How often each job's dead letter was retried."""
        return Counter(job_id for (job_id,) in self._read("SELECT job FROM retries"))

    def runs(self) -> Counter[str]:
        """How often each stock task ran."""
        return Counter(job_id for (job_id,) in self._read("SELECT job FROM runs"))

    def replies(self) -> list[Reply]:
        rows = self._read("SELECT command, refused, reply FROM replies")
        return [Reply(command, bool(no), json.loads(reply)) for command, no, reply in rows]

    def entries(self, job_id: str) -> list[Entry]:
        """The job's entries, in the order in which readers saw them."""
        query = "SELECT entry, seen_s, document FROM entries WHERE job = ? ORDER BY place"
        return [Entry(*row) for row in self._read(query, job_id)]

    def entry_count(self, job_id: str) -> int:
        return self._places.get(job_id, 0)

    def withdrawn_count(self) -> int:
        ((count,),) = self._read("SELECT count(*) FROM withdrawn")
        return int(count)

    def results(self, job_id: str) -> list[Result]:
        """The job's results, in the order in which they became visible."""
        query = "SELECT seen_s, document FROM results WHERE job = ? ORDER BY rowid"
        return [Result(*row) for row in self._read(query, job_id)]

    def kills(self) -> Iterator[Kill]:
        query = "SELECT number, kind, detail, worker, gone_s FROM kills ORDER BY number"
        for number, kind, detail, worker, gone_s in self._read(query):
            held = self._read("SELECT job, place FROM held WHERE kill = ?", number)
            yield Kill(kind, detail, worker, gone_s, dict(held))

    def _write(self, statement: str, *values: object) -> None:
        with self._lock:
            self._db.execute(statement, values)

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()
