"""Affinity: jobs whose prompts begin alike go to the worker that has computed the beginning.

Each worker's claims and ends keep its number of jobs in ``keys.load``, while it has room. A
producer ranks the workers for a prompt by rendezvous hashing: every producer finds the same order,
and a worker that comes or goes moves only its own prompts. ``lua/enqueue.lua`` takes the first of
them whose load is bounded, and wakes that worker instead of any.

A place is a preference and no more. The job waits like any other, and any worker with room may
take it at any moment: nothing has to be stolen from a busy worker or saved from a dead one. See
``lua/parts/affinity.lua``.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from hashlib import blake2b

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import unless_refused
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.queues import model_of, normal_queue
from llorch_worker.contract import GenerationRequest, JobRequest, Message

CANDIDATES = 4
"""How many workers a producer proposes for a job. If all have too much to do, the least loaded
worker of all gets it."""
LEAST_CHARS = 64
"""About a KV block of 16 tokens. Jobs share whole blocks, so it does not matter where a job with a
shorter beginning runs."""
MOST_CHARS = 256
"""Prompts that differ only later are taken for alike. More would miss templates that put a name or
a date near the beginning."""
FRESH_S = 5.0
"""How long a producer uses its list of workers before it reads it again."""


def prefix_key(request: GenerationRequest) -> str | None:
    """What jobs that begin alike have in common: their ``affinity_key``; else the beginning of
    their token ids, their text or their first message; None if it is too short to matter."""
    if request.affinity_key is not None:
        return f"key {request.affinity_key}"
    if request.prompt_token_ids is not None:
        ids = request.prompt_token_ids[: MOST_CHARS // 4]
        return f"ids {ids}" if len(ids) >= LEAST_CHARS // 4 else None
    text = _beginning(request.messages) if request.prompt is None else request.prompt
    return f"text {text[:MOST_CHARS]}" if len(text) >= LEAST_CHARS else None


def _beginning(messages: Iterable[Message] | None) -> str:
    """The first message, which is the system's, if any; with those after it if it is short."""
    text = ""
    for message in messages or ():
        text += f"{message.role}: {message.content or ''}\n"
        if len(text) >= LEAST_CHARS:
            break
    return text


class Affinity:
    """Ranks the workers of a model for a prompt. Thread-safe."""

    def __init__(self, client: Redis) -> None:
        self._redis = client
        self._seen: dict[str, tuple[float, list[str]]] = {}
        """Model -> when its workers were read, and their places."""

    def candidates(self, request: JobRequest, model: str) -> list[str]:
        """The places of the workers that suit the job best, the best first; none if it does
        not matter where it runs."""
        # Texts leave nothing behind that others could use.
        key = prefix_key(request) if isinstance(request, GenerationRequest) else None
        places = [] if key is None else self._places(model)
        if len(places) < 2:
            return []
        return heapq.nsmallest(CANDIDATES, places, lambda place: _rank(f"{place} {key}"))

    def _places(self, model: str) -> list[str]:
        read_at_s, places = self._seen.get(model, (float("-inf"), []))
        if time.monotonic() - read_at_s >= FRESH_S:
            places = registry.living(self._redis, model)
            self._seen[model] = time.monotonic(), places
        return places


def _rank(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def note_idle(client: Redis, place: str, jobs: int) -> None:
    """Corrects the number of ``jobs`` of a worker with room: not every end of a claim counts."""
    with unless_refused():
        client.zadd(_load_of(place), {place: jobs})


def leave(client: Redis, place: str) -> None:
    """Notes that no more jobs are to be placed with this worker."""
    client.zrem(_load_of(place), place)


def _load_of(place: str) -> str:
    return keys.load(normal_queue(model_of(place)))
