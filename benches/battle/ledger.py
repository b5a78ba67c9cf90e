"""What was promised and what was seen, kept by the harness and out of the broker's reach."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE jobs (id TEXT PRIMARY KEY, seed INTEGER, tokens INTEGER, sent_s REAL);
CREATE TABLE entries (
    job TEXT, place INTEGER, entry TEXT, seen_s REAL, document TEXT, PRIMARY KEY (job, place)
);
CREATE TABLE withdrawn (job TEXT, entry TEXT);
CREATE TABLE results (job TEXT, seen_s REAL, document TEXT);
CREATE TABLE kills (number INTEGER PRIMARY KEY, kind TEXT, detail TEXT, worker TEXT, gone_s REAL);
CREATE TABLE held (kill INTEGER, job TEXT, place INTEGER);
"""


@dataclass(frozen=True)
class Job:
    """One job as sent: its tokens follow from ``seed`` and there are ``tokens`` of them."""

    id: str
    seed: int
    tokens: int
    sent_s: float = 0.0


@dataclass(frozen=True)
class Entry:
    """One stream entry, when it was first seen."""

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
    """One blow to a worker; ``held`` are the jobs then in its hands, with the number of stream
    entries that each had.

    ``gone_s`` is when the worker stopped to be of use: its death, or when it was cut off.
    """

    kind: str
    detail: str
    worker: str
    gone_s: float
    held: Mapping[str, int]


class Ledger:
    """SQLite, one connection, any thread. Times are seconds of one monotonic clock."""

    def __init__(self, path: Path | None = None) -> None:
        """Without ``path`` it is in memory."""
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
        """Before the job is sent: what was sent and is not here cannot be lost."""
        self._write(
            "INSERT INTO jobs VALUES (?, ?, ?, ?)", job.id, job.seed, job.tokens, job.sent_s
        )

    def entry(self, job_id: str, entry: Entry) -> None:
        """A stream entry that was not there before."""
        place = self._places.get(job_id, 0)
        self._places[job_id] = place + 1
        self.last_activity_s = max(self.last_activity_s, entry.seen_s)
        self._write(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?)",
            job_id, place, entry.id, entry.seen_s, entry.document,
        )  # fmt: skip

    def withdrawn(self, job_id: str, entry_id: str) -> None:
        """An entry that a reader saw and that is gone."""
        self._write("INSERT INTO withdrawn VALUES (?, ?)", job_id, entry_id)

    def result(self, job_id: str, result: Result) -> None:
        """A document in the result backend; the same again is no news."""
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
        return [Job(*row) for row in self._read("SELECT * FROM jobs ORDER BY sent_s, rowid")]

    def entries(self, job_id: str) -> list[Entry]:
        """In the order of the stream, as readers saw it."""
        query = "SELECT entry, seen_s, document FROM entries WHERE job = ? ORDER BY place"
        return [Entry(*row) for row in self._read(query, job_id)]

    def entry_count(self, job_id: str) -> int:
        return self._places.get(job_id, 0)

    def withdrawn_count(self) -> int:
        ((count,),) = self._read("SELECT count(*) FROM withdrawn")
        return int(count)

    def results(self, job_id: str) -> list[Result]:
        """One after another, as they were visible."""
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
