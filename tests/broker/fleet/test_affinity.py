"""Jobs whose prompts begin alike go to the same worker, unless that makes one wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import affinity
from llorch_worker.broker.fleet.affinity import Affinity, prefix_key
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest, Taken
from llorch_worker.broker.queues import place_of
from llorch_worker.client import Client, Job
from llorch_worker.contract import GenerationRequest, InvalidRequest
from tests.broker.steps import DAYS_S, TERMS, note_seen, push
from tests.broker.test_maxmemory import fill
from tests.messages import QUEUE
from tests.store import record_of, write_record

SYSTEM = "You answer in one sentence, politely, and never mention the weather at all."
REQUEST = GenerationRequest(prompt=SYSTEM)
LOAD = keys.load(QUEUE)


@pytest.fixture
def ranked(store: redis.Redis) -> list[str]:
    """The places of four workers, as they suit REQUEST; all have room and run nothing."""
    places = [place_of("toy", f"gpu{number}@host") for number in range(4)]
    for place in places:
        note_seen(store, place)
        store.zadd(LOAD, {place: 0})
    return Affinity(store).candidates(REQUEST, "toy")


def woken(store: redis.Redis) -> set[str]:
    return {name.removeprefix("llorch:wake:") for name in store.keys("llorch:wake:*")}


def preferred(store: redis.Redis, job: Job) -> str | None:
    return record_of(store, job.id).get("prefers")


def look(store: redis.Redis, place: str, *, limit: int = 10, held: Sequence[Claim] = ()) -> Taken:
    """A look of the worker with this place, which leaves no jobs to others."""
    store.delete(keys.live("toy"))
    request = ClaimRequest("toy", (QUEUE,), limit, "w@h", tuple(held), place=place)
    return claims.claim(store, request, TERMS)


def chat(*contents: str, role: str = "system") -> GenerationRequest:
    roles = [role, *["user", "assistant"] * len(contents)]
    pairs = zip(roles, contents, strict=False)
    return GenerationRequest(messages=[{"role": r, "content": text} for r, text in pairs])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(SYSTEM, "Who?"), chat(SYSTEM, "Why?")),
        (chat("Be brief.", "x" * 300), chat("Be brief.", "x" * 300, "Yes.", "And now?")),
        (chat("x" * 300, role="user"), chat("x" * 300, "Yes.", "And now?", role="user")),
        (GenerationRequest(prompt="a" * 256 + "b"), GenerationRequest(prompt="a" * 256 + "c")),
        (
            GenerationRequest(prompt_token_ids=[*range(64), 1]),
            GenerationRequest(prompt_token_ids=[*range(64), 2]),
        ),
        (
            GenerationRequest(prompt="a" * 256, affinity_key="k"),
            GenerationRequest(prompt="b", affinity_key="k"),
        ),
    ],
)
def test_jobs_that_begin_alike_have_the_same_key(
    one: GenerationRequest, other: GenerationRequest
) -> None:
    assert prefix_key(one) == prefix_key(other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(SYSTEM, "Who?"), chat(SYSTEM, "Who?", role="user")),
        (chat("Be brief.", "x" * 300), chat("Be brief.", "y" * 300)),
        (GenerationRequest(prompt="a" * 255 + "b"), GenerationRequest(prompt="a" * 255 + "c")),
        (
            GenerationRequest(prompt="a" * 256, affinity_key="k"),
            GenerationRequest(prompt="a" * 256, affinity_key="l"),
        ),
    ],
)
def test_other_jobs_have_other_keys(one: GenerationRequest, other: GenerationRequest) -> None:
    assert prefix_key(one) != prefix_key(other)


@pytest.mark.parametrize(
    "request_", [chat("Be brief.", "Who?"), GenerationRequest(prompt="Once upon a time"),
                 GenerationRequest(prompt_token_ids=[1, 2])]
)  # fmt: skip
def test_a_job_that_shares_no_block_runs_anywhere(request_: GenerationRequest) -> None:
    assert prefix_key(request_) is None


def test_every_producer_ranks_the_workers_alike(store: redis.Redis, ranked: list[str]) -> None:
    assert len(set(ranked)) == 4
    assert Affinity(store).candidates(REQUEST, "toy") == ranked
    firsts = {
        Affinity(store).candidates(GenerationRequest(prompt="x", affinity_key=str(n)), "toy")[0]
        for n in range(64)
    }
    assert firsts == set(ranked)


def test_a_worker_that_leaves_moves_only_its_own_prompts(
    store: redis.Redis, ranked: list[str]
) -> None:
    note_seen(store, ranked[1], ago_s=DAYS_S)
    assert Affinity(store).candidates(REQUEST, "toy") == [ranked[0], *ranked[2:]]


def test_one_worker_or_none_is_no_choice(store: redis.Redis) -> None:
    assert Affinity(store).candidates(REQUEST, "toy") == []
    note_seen(store, place_of("toy", "gpu0@host"), place_of("toys", "gpu1@host"))
    assert Affinity(store).candidates(REQUEST, "toy") == []


def test_a_placed_job_waits_for_all_and_wakes_one(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    job = producer.submit(REQUEST)
    assert preferred(store, job) == ranked[0]
    assert woken(store) == {ranked[0]}
    assert store.zscore(LOAD, ranked[0]) == 1
    # Another worker may take it.
    assert len(look(store, ranked[3]).claims) == 1


def test_without_placement_a_job_wakes_any_worker(
    store: redis.Redis, producer: Client, ranked: list[str]
) -> None:
    settings = producer.settings.model_copy(update={"placement": False})
    with Client(settings, model="toy") as plain:
        assert preferred(store, plain.submit(REQUEST)) is None
    assert woken(store) == {QUEUE}


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((0, 0, 0, 0), 0),
        ((1, 0, 0, 0), 1),  # none that is busy while another is idle
        ((1, 1, 1, 0), 3),
        ((2, 1, 1, 1), 0),
        ((3, 1, 1, 1), 1),
        ((16, 12, 10, 8), 0),
        ((17, 12, 10, 8), 1),
        ((None, 3, 3, 3), 1),  # no room
    ],
)
def test_a_place_has_little_more_to_do_than_the_least_loaded(
    producer: Client,
    store: redis.Redis,
    ranked: list[str],
    loads: tuple[int | None, ...],
    chosen: int,
) -> None:
    for place, jobs in zip(ranked, loads, strict=True):
        if jobs is None:
            store.zrem(LOAD, place)
        else:
            store.zadd(LOAD, {place: jobs})
    producer.submit(REQUEST)
    assert woken(store) == {ranked[chosen]}


def test_a_worker_that_is_no_candidate_gets_the_job_if_it_has_least_to_do(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    for place in ranked:
        store.zadd(LOAD, {place: 2})
    other = place_of("toy", "unheard@host")
    store.zadd(LOAD, {other: 0})
    producer.submit(REQUEST)
    assert woken(store) == {other}


def test_jobs_that_come_together_spread(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    for _ in range(40):
        producer.submit(REQUEST)
        store.delete(*map(keys.wake, ranked))
    loads = [jobs for _, jobs in store.zrange(LOAD, 0, -1, withscores=True)]
    assert (sum(loads), len(loads)) == (40, 4)
    assert max(loads) <= 2 * min(loads) + 1


def test_a_job_for_full_workers_wakes_whoever_has_room_first(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    store.delete(LOAD)
    job = producer.submit(REQUEST)
    assert woken(store) == {QUEUE}
    assert preferred(store, job) == ranked[0]


def test_a_worker_that_left_its_last_wake_up_is_passed_over(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    for place in ranked[1:]:
        store.zadd(LOAD, {place: 5})
    producer.submit(REQUEST)
    producer.submit(REQUEST)
    assert woken(store) == {ranked[0], QUEUE}
    assert store.zscore(LOAD, ranked[0]) is None


def end(store: redis.Redis, claim: Claim) -> None:
    assert claims.fail(store, claim, InvalidRequest("no"), TERMS)


def test_claims_and_ends_keep_the_load(store: redis.Redis, ranked: list[str]) -> None:
    place, *others = ranked
    push(store, "a", "b", "c")
    taken = look(store, place).claims
    assert store.zscore(LOAD, place) == 3
    end(store, taken[0])
    assert store.zscore(LOAD, place) == 2
    push(store, "d")
    assert len(look(store, place, limit=1, held=taken[1:]).claims) == 1
    assert store.zscore(LOAD, place) is None  # full
    end(store, taken[1])
    assert store.zscore(LOAD, place) is None  # its next look tells
    look(store, place, held=taken[2:])
    assert store.zscore(LOAD, place) == 1
    assert [store.zscore(LOAD, other) for other in others] == [0, 0, 0]
    affinity.note_idle(store, place, 0)
    assert store.zscore(LOAD, place) == 0
    affinity.leave(store, place)
    assert store.zscore(LOAD, place) is None


def test_a_worker_with_which_no_jobs_are_placed_has_no_load(store: redis.Redis) -> None:
    push(store, "a")
    (claim,) = look(store, "").claims
    end(store, claim)
    assert not store.exists(LOAD)


def submit(client: Client, store: redis.Redis, *places: str | None) -> list[str]:
    """Ids of jobs that are placed there, in the order of their enqueueing."""
    ids = []
    for place in places:
        store.delete(LOAD)
        if place is not None:
            store.zadd(LOAD, {place: 0})
        ids.append(client.submit(REQUEST if place else GenerationRequest(prompt="x")).id)
    return ids


def claimed(store: redis.Redis, place: str, limit: int = 1) -> list[str]:
    return [claim.job_id for claim in look(store, place, limit=limit).claims]


def test_of_the_jobs_that_wait_a_worker_takes_its_own_first(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    one, other, *_ = ranked
    first, second, third, fourth = submit(producer, store, one, other, one, other)
    assert claimed(store, other, limit=2) == [second, fourth]
    assert claimed(store, other, limit=2) == [first, third]


def test_a_worker_takes_others_jobs_rather_than_none(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    ids = submit(producer, store, ranked[0], None, ranked[0])
    assert claimed(store, ranked[1], limit=3) == ids


def age(store: redis.Redis, job_id: str, by_s: float) -> None:
    """As if the job had been enqueued earlier."""
    write_record(store, job_id, sent=f"{float(record_of(store, job_id)['sent']) - by_s:.6f}")


def test_no_job_is_overtaken_for_ever(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    first, second = submit(producer, store, ranked[0], ranked[1])
    age(store, first, by_s=3)
    assert claimed(store, ranked[1]) == [first]
    assert claimed(store, ranked[1]) == [second]


def test_a_time_in_the_future_lets_no_more_jobs_pass(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    first, second = submit(producer, store, ranked[0], ranked[1])
    age(store, first, by_s=-50)
    age(store, second, by_s=-100)
    assert claimed(store, ranked[1], limit=2) == [first, second]


def test_a_worker_wakes_another_for_the_jobs_that_it_leaves(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    submit(producer, store, ranked[0], ranked[1])
    store.delete(*map(keys.wake, ranked))
    claimed(store, ranked[1])
    assert woken(store) == {QUEUE}


def test_an_idle_worker_whose_redis_lacks_replicas_goes_on_waiting(store: redis.Redis) -> None:
    place = place_of("toy", "w@h")
    store.config_set("min-replicas-to-write", 1)
    affinity.note_idle(store, place, 0)
    store.config_set("min-replicas-to-write", 0)
    assert not store.exists(keys.load(QUEUE)), "the write was refused"


def test_at_maxmemory_claims_and_ends_go_on(
    producer: Client, store: redis.Redis, ranked: list[str]
) -> None:
    submit(producer, store, ranked[0], ranked[1])
    fill(store)
    (claim,) = look(store, ranked[1], limit=1).claims
    assert store.zscore(LOAD, ranked[1]) is None
    look(store, ranked[1], limit=0, held=[claim])
    affinity.note_idle(store, ranked[1], 1)
    end(store, claim)
