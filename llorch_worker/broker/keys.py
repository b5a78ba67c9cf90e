"""Every Redis key and channel. The Lua scripts get these names from here: see ``scripts.py``.

Times in Redis are in ms by its own clock, where no other unit is named.
"""

from __future__ import annotations

PREFIX = "llorch:"


class Key:
    """A key for each thing of a kind: ``job("a")`` is ``llorch:job:a``."""

    def __init__(self, form: str, prefix: str = PREFIX) -> None:
        self._form = prefix + form

    def __call__(self, *names: str | int) -> str:
        return self._form.format(*names)


# Workers and models: see fleet/ and waiting/inbox_watch.py ---------------------------------------

MODELS = f"{PREFIX}models"
"""Hash: model -> JSON of a ``ModelCard``. Never expires."""
live = Key("live:{}")
"""By model. Sorted set: place, a worker's name in the registry -> when it was last seen."""
contexts = Key("contexts:{}")
"""By model. Sorted set: context that a worker has -> when such a worker was last seen."""
worker = Key("worker:{}")
"""By place. JSON of a ``WorkerCard``, with a TTL of a few seconds."""
load = Key("load:{}")
"""By normal queue. Sorted set: place -> how many jobs that worker runs, if it has room."""
watch = Key("watch:{}")
"""By model. The lease of the worker that watches its lists for producers that wake nobody."""
RESIDENTS = f"{PREFIX}residents"
"""Hash of the workers with several models: worker -> JSON of its note; ``left <model>`` -> when the
last worker that had the model loaded changed. See residents.py."""
RESIDENTS_FENCE = f"{PREFIX}residents:fence"
"""How often such workers have decided to change."""
SWEPT = f"{PREFIX}swept"
"""The lease of the worker that looked for jobs of dead workers, so that no other does for a while.
"""

# Jobs ---------------------------------------------------------------------------------------------

LEASES = f"{PREFIX}leases"
"""Sorted set: claimed job -> when its lease ends."""
call = Key("call:{}")
"""By worker. JSON of what its last call claimed: the call's id, then of each job its id and its
fence. Expires with their leases."""
DEADLINES = f"{PREFIX}deadlines"
"""Sorted set: job with a deadline, from its enqueueing or its claim on -> when to see whether it
waits. Those that have ended in time stay until then."""
FOLLOW_UPS = f"{PREFIX}follow_ups"
"""Sorted set: ended job after whose end Celery has more to do -> when a worker may take this up."""
DEAD = f"{PREFIX}dead_letters"
"""List of dead letters, newest first: number, bytes and owner. See lua/parts/letters.lua."""
LETTERS = f"{PREFIX}dead_letters:by_number"
"""Hash: number of a dead letter -> its JSON: see dead_letters.py."""
LETTERS_HELD = f"{PREFIX}dead_letters:held"
"""Hash: ``letters <owner>`` and ``bytes <owner>`` -> how many dead letters are his."""
ENDED_JOBS = f"{PREFIX}ended"
"""List of the jobs that ended last, newest first: see ended_jobs.py."""
HISTORY = f"{PREFIX}history"
"""List of points of the last hour, newest first: see history.py."""
HISTORY_LEASE = f"{PREFIX}history:lease"
"""The lease of the gateway that added the last point; the next is due when it ends."""
usage = Key("usage:{}")
"""By day, counted from 1970-01-01 in UTC. Hash: ``<tenant>/<model>/<what>`` -> how much the jobs
that ended that day used: see usage.py. Expires ``usage_days`` after."""
job = Key("job:{}")
"""By job. Hash, the job's record, from its enqueueing, or its move out of the inbox, to its end.

Always ``state``, see :data:`MOVES`, and ``list``, the inbox list of its model and priority.
From our client: ``sent``, the Unix time at which it enqueued the job, ``tenant``, ``idempotency``,
its key, with ``request``, a digest of what was sent with the key, ``owner``, the gateway's key that
sent it, and ``prefers``, the worker that it is placed with. If a client is about to read the stream
``awaited_s``, the Unix time until which it counts as reading it. From a gateway before that
``reserved``: the key's name and how many tokens of its rates are reserved, or empty.
Of a stock producer's job: ``came_ms``, when it was moved, ``tenant``, ``eta`` as its message has
it, or empty, and ``unread``, 1 if Python is to read the message.
Before the first claim: ``cost``, what its tenant's share was charged for it.
What it needs, or empty: ``needs_fingerprint``, the model that began it, and ``least_context``.
``reads``: 1 if it reads texts for vectors or scores, and generates none.
From the first claim on: ``fence``, ``attempts``, ``worker``, ``lease_ms``, ``history``,
``first_claim_ms``, ``score``, ``progress`` (1 if this attempt's tokens are journalled), ``place``,
the worker's in ``load``, or empty, and ``eta_ms``, if it has waited for that ETA. Once it has lost
a worker or an engine: ``deaths``. While it is a suspect ``strikes``, see ``lua/release.lua``.
``buried``: the number of its dead letter. ``retried_by``: the call that retried that, at
``retried_ms``.
"""
MOVES: dict[str, dict[str, tuple[str | None, ...]]] = {
    "enqueue": {"waiting": (None,)},
    "watch": {"waiting": (None, "scheduled")},
    "claim": {"waiting": (None,), "claimed": ("waiting", None), "ended": ("waiting", None)},
    "release": {
        "waiting": ("claimed",),
        "scheduled": ("claimed",),
        "ended": ("claimed",),
    },
    "sweep": {"waiting": ("claimed",)},
    "finish": {"ended": ("claimed", None)},
    "cancel": {"waiting": (None,), "ended": ("waiting", "scheduled", "claimed", None)},
    "reread": {"waiting": (None,)},
    "restore": {"waiting": (None,)},
    "retry": {"waiting": ("ended", None)},
}
"""The states of a job, and the scripts that move it: script -> to which state -> from which. None:
it has no record, or one without a state: its message may be in an inbox.

``waiting`` for a worker: it is in ``keys.waiting``. ``scheduled``: it waits for its ETA, in
``keys.scheduled``. ``claimed`` by a worker: it is in ``LEASES``. ``ended``: in none. ``claim``,
``watch`` and ``cancel`` also move what they find in an inbox. ``purge`` deletes jobs that wait.
"""
message = Key("message:{}")
"""By job. Its Celery message, as a producer pushed it. It goes with the end, or, if more is to be
done then, after that: see follow_ups.py."""
staged = Key("staged:{}")
"""By call. A job's message, if it is larger than :data:`APART_BYTES`, until ``lua/enqueue.lua``
makes it ``message``; or ``lua/watch.lua``, if it came to an inbox. Expires soon."""
APART_BYTES = 2**16
"""Larger messages go by commands of their own, before the script that enqueues the job and after
that which claims it: Redis answers nobody while a script copies what it gets, reads or returns."""
events = Key("job:{}:events")
"""By job. Stream; each entry has the one field ``event``, a JSON document of the contract."""
cancel = Key("cancel:{}")
"""By claimed job. The id of the call that requested its cancel; that call is sent again if its
reply is lost. Expires with the results."""
idempotency = Key("idempotency:{}:{}")
"""By model and idempotency key. The id of the first job that was sent with it. Which ends of that
job leave the key free, ``lua/parts/first_job.lua`` says."""
result = Key("celery-task-meta-{}", prefix="")
"""By job. Key and pub/sub channel of Celery's Redis backend. All databases share the channel."""
events_channel = Key("/{}." + PREFIX + "job:{}:events", prefix="")
"""By database, because all databases share their channels, and job. Each message is what was
written to the job's stream: the number of its first entry, then the events, each on a line. Whoever
reads the stream subscribes, and the reply to PUBLISH shows it."""
cancel_channel = Key("/{}." + PREFIX + "cancel", prefix="")
"""By database, because all databases share their channels. Each message is the id of a job to
cancel now."""

# What waits: see queues.py, wake_ups.py and lua/parts ---------------------------------------------

waiting = Key("waiting:{}")
"""By model. Sorted set: job that waits for a worker -> its score, see ``lua/parts/score.lua``."""
SCORES_A_CLASS = 2**51
"""High jobs have scores from 0 on, normal ones from here on, and low ones from twice this on."""
SCORES_OF_TEXTS = SCORES_A_CLASS // 2
"""In each class, from here on are the jobs that read texts."""
scheduled = Key("scheduled:{}")
"""By model. Sorted set: job that waits for its ETA -> when it is due."""
shares = Key("shares:{}")
"""By model. Sorted set of tenants' shares: see ``lua/parts/score.lua``."""
searched = Key("searched:{}")
"""By model, class and what callers have in common. The score up to which the last search by such a
caller found no job that it can take. Expires soon after."""
aged = Key("aged:{}")
"""By model. Hash: class, with a t of jobs that read texts -> when one of its jobs last went before
more urgent ones for its age."""

FULL_SUFFIX = ":full"
wake = Key("wake:{}")
"""By queue. The wake key: a list with at most one entry, a wake-up, which wakes one of the workers
that wait for jobs of the queue. A wake-up holds no job. Under the queue's name with ``:texts``: of
workers that now wait for jobs that read texts alone."""
full_wake = Key("wake:{}" + FULL_SUFFIX)
"""By high queue. The wake key of workers without room. It gets a wake-up together with ``wake``."""
token_questions = Key("tokens:{}:questions")
"""By model. List of questions about its tokens, each JSON; any of its workers takes one. Expires
soon after the last."""
token_answer = Key("tokens:answer:{}")
"""By question. List that the one answer is pushed to, as JSON. Expires soon."""

# Gateways -----------------------------------------------------------------------------------------

WEBHOOKS = f"{PREFIX}gateway:webhooks"
"""Sorted set: webhook that is to be delivered -> when to try next."""
BATCH_LEASES = f"{PREFIX}gateway:batch_leases"
"""Sorted set: batch that has not ended -> when its gateway's lease ends."""
FILES_DUE = f"{PREFIX}gateway:files_due"
"""Sorted set: file that expires -> when, as Unix time."""
key_jobs = Key("gateway:key:{}:jobs")
"""By name of a gateway's key. Sorted set: job that it has in flight -> since when."""
key_rates = Key("gateway:key:{}:rates")
"""By name of a gateway's key. Hash: ``requests_minute``, ``tokens_day`` and so on -> how much of
that limit was used ``at`` that time, in ms; it empties evenly. See ``gateway/lua/admit.lua``."""
response = Key("gateway:response:{}")
"""By job. JSON of a ``ResponseRecord``, with a TTL of ``response_ttl_s``. What came of it is the
job's result."""
gateway_document = Key("gateway:document:{}")
"""By file or batch. Hash: ``document``, the JSON of its record. A batch also has ``fence``, the
token of its driver's lease; ``counts``, JSON of its lines so far; and ``cancelling_at``, the Unix
time of a request to cancel it."""
gateway_documents = Key("gateway:{}:{}")
"""By kind and name of a gateway's key. Sorted set: its files or batches -> Unix time. Ids of
records that have expired are removed by the next list."""
webhook = Key("gateway:webhook:{}")
"""By webhook. Hash: ``url``, ``caller`` (the name of the gateway's key), ``kind``, ``since_ms``,
``attempts``, ``body`` once its event has happened, and ``reason``, why the last attempt failed."""
dead_webhooks = Key("gateway:key:{}:dead_webhooks")
"""By name of a gateway's key. Sorted set: webhook that was given up -> when."""
