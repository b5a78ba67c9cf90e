"""What was accepted and what became of it, beside what Redis holds: see ``test_protocol.py``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest, ClaimTerms
from llorch_worker.broker.jobs.held_claims import HeldClaims
from llorch_worker.client.lost import GRACE_S, Trace
from llorch_worker.contract import JobLost

TERMS = ClaimTerms(lease_ms=60_000, max_attempts=2, max_deaths=4, result_ttl_s=60, stream_ttl_s=60)
LIVE = ("scheduled", "claimed", "waiting")
ENDS = ("SUCCESS", "FAILURE", "REVOKED")
LAST_EVENTS = ("finished", "failed", "cancelled")
REGISTRY = {
    keys.DEAD, keys.LETTERS, keys.LETTERS_HELD, keys.MODELS, keys.live("toy"),
    keys.load(queues.normal_queue("toy")), keys.shares("toy"),
    keys.aged("toy"), keys.contexts("toy"),
}  # fmt: skip
"""Keys that stay when all jobs have ended."""

_STORED = json.dumps({"status": "PENDING", "result": None})
"""In the place of the results, which are not what workers store."""
_DUMP = """
local read = {
  string = function(key) return redis.call('GET', key) end,
  hash = function(key) return redis.call('HGETALL', key) end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
  set = function(key) return redis.call('SMEMBERS', key) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
  stream = function(key) return redis.call('XRANGE', key, '-', '+') end,
}
local clock = redis.call('TIME')
local found = {clock[1] * 1000 + math.floor(clock[2] / 1000)}
for _, key in ipairs(redis.call('KEYS', '*')) do
  found[#found + 1] = {key, redis.call('TTL', key), read[redis.call('TYPE', key).ok](key)}
end
return found
"""


@dataclass
class Job:
    """An accepted job, as its producer, its readers and its workers know it."""

    id: str
    message: str = ""
    pushed: int = 1
    """How many messages name it."""
    key: str | None = None
    """The idempotency key that it holds, or that its worker will reserve."""
    keyed: bool = False
    owner: str = ""
    """The gateway's key that sent it."""
    watched: bool = False
    """Whether its reader knows that it was enqueued: our client does."""
    part: bool = False
    """Whether Celery has more to do after its end, whatever that is."""
    tokens: int = 0
    fence: int = 0
    process: Process | None = None
    """The process of its last claim."""
    deaths: int = 0
    strikes: int | None = None
    """While it is a suspect: the engines that died while they computed it."""
    progress: bool = False
    """Whether it made progress since its last claim."""
    cancelled: bool = False
    """Whether a client asked its worker to cancel it."""
    end: str | None = None
    """The result, once it is visible."""
    forgotten: bool = False
    """Its end is so long ago that Redis forgot it, or Redis lost its data."""
    lost: bool = False
    """Redis lost it, and no worker put it back."""


@dataclass
class Run:
    """A claim that a process believes it holds, and its unconfirmed entries."""

    claim: Claim
    next_entry: int = 0
    tokens: int = 0
    unconfirmed: list[str] = field(default_factory=list)
    unconfirmed_tokens: int = 0
    started: bool = False
    ended: bool = False


@dataclass(eq=False)
class Process:
    """A worker process: what it knows, which may be out of date."""

    name: str
    model: str = "a"
    """The fingerprint of what it serves, and the text of each of its tokens."""
    held: HeldClaims = field(default_factory=HeldClaims)
    unheard: tuple[ClaimRequest, list[Claim]] | None = None
    """Its last call and what it claimed, if the reply was lost."""
    runs: list[Run] = field(default_factory=list)
    following: list[tuple[str, str, int]] = field(default_factory=list)
    """Ends whose follow-ups it has done and not yet noted."""

    def forget(self, run: Run) -> None:
        self.held.discard(run.claim)
        if run in self.runs:
            self.runs.remove(run)


@cache
def id_of(message: str) -> str:
    return str(json.loads(message)["headers"]["id"])


def _pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


class Snapshot:
    """Everything in Redis at one moment."""

    def __init__(self, store: redis.Redis) -> None:
        self.now_ms, *found = store.eval(_DUMP, 0)
        self.ttl_s = {key: ttl_s for key, ttl_s, _ in found}
        self._values = {key: value for key, _, value in found}
        self.inbox = Counter(
            id_of(message)
            for key, value in self._values.items()
            if key.startswith(queues.QUEUE_PREFIX)
            for message in value
        )
        """How many messages of each job nobody has moved yet."""
        self.waiting = self._scores(keys.waiting("toy"))
        self.scheduled = self._scores(keys.scheduled("toy"))
        self.leases = self._scores(keys.LEASES)
        self.follow_ups = self._scores(keys.FOLLOW_UPS)

    def _scores(self, key: str) -> dict[str, float]:
        return {member: float(score) for member, score in _pairs(self._values.get(key, ()))}

    def may_be_repeated(self, job_id: str) -> bool:
        """Whether the job has ended with a retriable error."""
        stored = self.value(keys.result(job_id))
        result = json.loads(stored)["result"] if stored else None
        return (
            isinstance(result, dict)
            and "exc_message" in result
            and result["exc_message"][2:3] == [True]
        )

    def record(self, job_id: str) -> dict[str, str]:
        return dict(_pairs(self._values.get(keys.job(job_id), ())))

    def state(self, job_id: str) -> str | None:
        return self.record(job_id).get("state")

    def holds(self, claim: Claim) -> bool:
        record = self.record(claim.job_id)
        return record.get("state") == "claimed" and int(record["fence"]) == claim.fence

    def value(self, key: str) -> Any:
        return self._values.get(key)

    def end(self, job_id: str) -> str | None:
        """The job's result, if it is its last."""
        document: str | None = self._values.get(keys.result(job_id))
        return document if document and json.loads(document)["status"] in ENDS else None

    def events(self, job_id: str) -> list[dict[str, Any]]:
        entries = self._values.get(keys.events(job_id), ())
        return [json.loads(fields[1]) for _, fields in entries]

    def is_suspect(self, job_id: str) -> bool:
        """Whether the claimed job may have killed its last engine."""
        record = self.record(job_id)
        last = int(record.get("deaths", 0)) >= TERMS.max_deaths - 1
        return last or ("strikes" in record and record["progress"] == "0")


def check(jobs: dict[str, Job], processes: Sequence[Process], seen: Snapshot) -> None:
    """Every promise, now."""
    known = set(jobs)
    assert set(seen.inbox) | set(seen.waiting) | set(seen.leases) | set(seen.scheduled) <= known
    for job in jobs.values():
        _check_place(job, seen)
        _check_end(job, seen)
        _check_stream(job, seen)
        _check_expiry(job, seen)
        _check_reader(job, seen)
    _check_suspects(processes, seen)
    for job_id in known:
        holders = [
            process
            for process in processes
            for run in process.runs
            if run.claim.job_id == job_id and seen.holds(run.claim)
        ]
        assert len(holders) <= 1, f"{job_id} has two holders"


def _check_place(job: Job, seen: Snapshot) -> None:
    """Each job is in one place; a message that was pushed twice may still be in the inbox."""
    state, unmoved = seen.state(job.id), seen.inbox[job.id]
    for place, where in {
        "claimed": seen.leases, "scheduled": seen.scheduled, "waiting": seen.waiting
    }.items():  # fmt: skip
        assert (job.id in where) == (state == place), f"{job.id} is lost, or doubled: {state}"
    if state in LIVE:
        assert unmoved < job.pushed
    elif state is None and not job.forgotten:
        assert 1 <= unmoved <= job.pushed, f"{job.id} is lost, or doubled"
    else:
        assert job.end is not None or job.forgotten
    assert unmoved <= job.pushed
    kept = state in LIVE or job.id in seen.follow_ups
    assert bool(seen.value(keys.message(job.id))) == kept, (job.id, state, kept)


def _check_end(job: Job, seen: Snapshot) -> None:
    """One end is visible, and never another."""
    assert seen.end(job.id) == job.end
    assert (seen.state(job.id) == "ended") == (job.end is not None)


def _check_stream(job: Job, seen: Snapshot) -> None:
    """Every token is in the stream once, all are of one model, and its end is last."""
    if job.forgotten:
        return
    events = seen.events(job.id)
    tokens = [event for event in events if event["type"] == "tokens"]
    ids = [token for event in tokens for token in event["ids"]]
    assert ids == list(range(job.tokens)), job.id
    assert [event["index"] for event in tokens] == [event["ids"][0] for event in tokens]
    assert len({event["text"] for event in tokens}) <= 1, f"{job.id} is of two models"
    lasts = [n for n, event in enumerate(events) if event["type"] in LAST_EVENTS]
    assert lasts == ([] if job.end is None else [len(events) - 1]), (job.id, events)


def _check_reader(job: Job, seen: Snapshot) -> None:
    """Its owner is the only one that may read it, and whoever waits for a lost job is told."""
    record = seen.record(job.id)
    if seen.state(job.id) is not None and not job.forgotten:
        assert record.get("owner", "") == job.owner, job.id
    trace = Trace(job.id, -GRACE_S, known=job.watched)
    stored = seen.value(keys.result(job.id)) and _STORED
    try:
        trace.state((stored, (seen.state(job.id), record.get("sent"))))
    except JobLost:
        assert job.forgotten, f"{job.id} is not lost"
    else:
        assert not (job.lost and job.watched), f"nobody is told that {job.id} is lost"


def _check_expiry(job: Job, seen: Snapshot) -> None:
    """Traces of a job stay until it ends, and no longer than they must."""
    traces = [keys.job(job.id), keys.result(job.id), keys.events(job.id)]
    if job.keyed and not job.forgotten:
        assert job.key is not None
        traces.append(job.key)
        assert seen.value(job.key) == job.id, f"the key of {job.id} is another's"
    found = {key: seen.ttl_s[key] for key in traces if key in seen.ttl_s}
    state = seen.state(job.id)
    if state in LIVE:
        if job.key and (state == "scheduled" or "first_claim_ms" not in seen.record(job.id)):
            found.pop(job.key, None)
        assert set(found.values()) == {-1}, found
    elif state == "ended":
        if job.id in seen.follow_ups:
            assert found.pop(keys.job(job.id)) == -1
        assert -1 not in found.values(), found


def _check_suspects(processes: Sequence[Process], seen: Snapshot) -> None:
    """No process holds two suspects. One that lapses is held by none."""
    for process in processes:
        held = [run.claim.job_id for run in process.runs if seen.holds(run.claim)]
        assert sum(map(seen.is_suspect, held)) <= 1, (process.name, held)
