"""The publisher against a real Redis that goes away and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs import journal
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.contract import CallPart, CancelledEvent, Event, Tokens, decode_event
from llorch_worker.contract.result import TokenLogprobs
from llorch_worker.engine.told import TokensTold
from llorch_worker.settings import Settings
from llorch_worker.worker.publisher import Publisher
from tests.broker.steps import claim_on
from tests.services import RedisServer, wait_until
from tests.store import ask_cancel, entries_of, record_of
from tests.told import merged

FLUSH_S = 10.0


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with connect(redis_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def publisher(store: redis.Redis) -> Iterator[Publisher]:
    publisher = started(store)
    yield publisher
    publisher.close()


def started(
    client: redis.Redis, lost: list[Claim] | None = None, cancelled: list[str] | None = None
) -> Publisher:
    on_lost = ([] if lost is None else lost).append
    on_cancelled = ([] if cancelled is None else cancelled).append
    settings = Settings(flush_interval_ms=5, stream_ttl_s=60)
    publisher = Publisher(client, settings, on_lost=on_lost, on_cancelled=on_cancelled)
    publisher.start()
    return publisher


def claimed(store: redis.Redis, job_id: str) -> Claim:
    """A claim as claim.lua leaves it, without a queue."""
    fence = int(store.hincrby(keys.job(job_id), "fence", 1))
    store.hset(keys.job(job_id), mapping={"state": "claimed", "progress": 0})
    return claim_on(job_id, fence)


def patience(timeout_s: float) -> Callable[[], bool]:
    """Gives up after ``timeout_s``."""
    until_s = time.monotonic() + timeout_s
    return lambda: time.monotonic() > until_s


def token(index: int) -> TokensTold:
    return TokensTold(0, 0, index, [index], f"{index} ")


def read(store: redis.Redis, job_id: str) -> list[Event]:
    return [decode_event(event) for _, event in entries_of(store, job_id)]


def ids_of(events: list[Event]) -> list[int]:
    return [i for event in events if isinstance(event, Tokens) for i in event.ids]


def test_events_arrive_once_and_in_order(publisher: Publisher, store: redis.Redis) -> None:
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    for index in range(200):
        publisher.append(claim, token(index))
    assert publisher.flush(claim, patience(FLUSH_S))
    events = read(store, "a")
    assert ids_of(events) == list(range(200))
    assert len(events) < 100, "tokens are written in batches"
    assert record_of(store, "a").get("progress") == "1"


@pytest.mark.parametrize(("watched", "tokens", "entries"), [(1, 5, 5), (1, 20, 1), (0, 5, 1)])
def test_tokens_stay_apart_for_a_reader_that_keeps_up(
    publisher: Publisher, store: redis.Redis, watched: int, tokens: int, entries: int
) -> None:
    claim = claimed(store, "a")
    pubsub = store.pubsub()
    if watched:
        pubsub.subscribe(keys.events_channel(0, "a"))
        assert pubsub.get_message(timeout=FLUSH_S)
    publisher.open(claim, 1)
    publisher.append(claim, token(0))
    assert publisher.flush(claim, patience(FLUSH_S))
    publisher.expect_end(claim)
    for index in range(1, tokens + 1):
        publisher.append(claim, token(index))
    left = publisher.take(claim, patience(FLUSH_S))
    pubsub.close()
    assert left is not None
    assert len(left.events) == entries
    assert ids_of(list(left.events)) == list(range(1, tokens + 1))


def test_an_engine_hears_when_a_client_begins_to_read_and_when_it_stops(
    publisher: Publisher, store: redis.Redis
) -> None:
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    heard: list[bool] = []
    publisher.tell_readers(claim, heard.append)
    indices = iter(range(10))

    def heard_at_a_write() -> list[bool]:
        heard.clear()
        publisher.append(claim, token(next(indices)))
        assert publisher.flush(claim, patience(FLUSH_S))
        return heard

    with store.pubsub() as pubsub:
        assert heard_at_a_write() == [False]
        assert heard_at_a_write() == []
        pubsub.subscribe(keys.events_channel(0, "a"))
        assert pubsub.get_message(timeout=FLUSH_S)
        assert heard_at_a_write() == [True]
        assert heard_at_a_write() == []
        # A job's engine may get it after the first write.
        publisher.tell_readers(claim, heard.append)
        assert heard == [True]
        pubsub.unsubscribe()
        wait_until(lambda: store.pubsub_numsub(keys.events_channel(0, "a"))[0][1] == 0)
        assert heard_at_a_write() == [False]


def test_jobs_that_run_side_by_side_are_written_together(store: redis.Redis) -> None:
    # Its thread has not begun.
    publisher = Publisher(store, Settings(), on_lost=print, on_cancelled=print)
    # Of what may wait for 0.2 s: what has waited so long, more than half of it, and not at all.
    for job_id, waited_s in (("due", 0.3), ("soon", 0.15), ("later", -3600.0)):
        claim = claimed(store, job_id)
        publisher.open(claim, 1)
        publisher.append(claim, token(0))
        outbox = publisher._outboxes[claim.tag]
        outbox.watched = outbox.urgent = False
        outbox.written_at_s = time.monotonic() - waited_s
    assert [each.claim.job_id for each in publisher._wait_for_due()] == ["due", "soon"]


def test_a_redis_restart_loses_and_doubles_nothing(own_server: RedisServer) -> None:
    with connect(own_server.url) as store:
        publisher = started(store)
        claim = claimed(store, "a")
        publisher.open(claim, 1)
        for index in range(50):
            publisher.append(claim, token(index))
        wait_until(lambda: read(store, "a"))
        own_server.halt()
        for index in range(50, 500):
            publisher.append(claim, token(index))
        assert not publisher.flush(claim, patience(0.05))
        own_server.start()
        assert publisher.flush(claim, patience(FLUSH_S))
        assert ids_of(read(store, "a")) == list(range(500))
        publisher.close()


def test_a_worker_that_lost_its_claim_writes_nothing_more(store: redis.Redis) -> None:
    lost: list[Claim] = []
    publisher = started(store, lost)
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    publisher.append(claim, token(0))
    assert publisher.flush(claim, patience(FLUSH_S))
    claimed(store, "a")
    publisher.append(claim, token(1))
    assert not publisher.flush(claim, patience(FLUSH_S))
    wait_until(lambda: lost == [claim])
    publisher.append(claim, token(2))
    publisher.close()
    assert ids_of(read(store, "a")) == [0]


def test_an_event_that_cannot_be_written_stops_no_other_job(
    publisher: Publisher, store: redis.Redis
) -> None:
    broken, sound = claimed(store, "a"), claimed(store, "b")
    for claim in broken, sound:
        publisher.open(claim, 1)
    publisher.append(broken, Tokens.model_construct(index=0, ids=(0,), text="\ud800"))
    publisher.append(sound, token(0))
    assert publisher.flush(broken, patience(FLUSH_S))
    assert publisher.flush(sound, patience(FLUSH_S))
    publisher.append(broken, token(1))
    assert publisher.flush(broken, patience(FLUSH_S))
    assert ids_of(read(store, "a")) == [1]
    assert ids_of(read(store, "b")) == [0]


def test_the_next_attempt_goes_on_where_the_stream_ends(
    publisher: Publisher, store: redis.Redis
) -> None:
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    publisher.append(claim, token(0))
    assert publisher.flush(claim, patience(FLUSH_S))
    publisher.close_job(claim)
    page = journal.read(store, "a")
    assert page.journal.choices[0].token_ids == (0,)
    claim = claimed(store, "a")
    publisher.open(claim, page.next_entry)
    publisher.append(claim, token(1))
    assert publisher.flush(claim, patience(FLUSH_S))
    assert [entry_id for entry_id, _ in entries_of(store, "a")] == ["1-0", "2-0"]


def test_a_stream_key_of_another_type_harms_no_other_job(
    publisher: Publisher, store: redis.Redis
) -> None:
    store.set(keys.events("bad"), "something else")
    bad = claimed(store, "bad")
    publisher.open(bad, 1)
    good = claimed(store, "good")
    publisher.open(good, 1)
    publisher.append(bad, token(0))
    publisher.append(good, token(0))
    assert publisher.flush(good, patience(FLUSH_S))
    assert publisher.flush(bad, patience(FLUSH_S))


def test_closing_writes_what_is_left(store: redis.Redis) -> None:
    publisher = started(store)
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    for index in range(10):
        publisher.append(claim, token(index))
    publisher.close()
    assert ids_of(read(store, "a")) == list(range(10))


def test_what_is_unwritten_at_the_end_is_left_to_the_result(
    publisher: Publisher, store: redis.Redis
) -> None:
    claim = claimed(store, "a")
    publisher.open(claim, 3)
    publisher.expect_end(claim)
    publisher.append(claim, token(0))
    publisher.append(claim, token(1))
    left = publisher.take(claim, patience(FLUSH_S))
    assert left is not None
    assert (left.first_entry, ids_of(list(left.events))) == (3, [0, 1])
    assert publisher.flush(claim, patience(FLUSH_S)), "nothing is left here"
    assert read(store, "a") == []


def test_a_job_that_goes_elsewhere_after_its_last_event_is_journalled(
    publisher: Publisher, store: redis.Redis
) -> None:
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    publisher.expect_end(claim)
    publisher.append(claim, token(0))
    assert publisher.flush(claim, patience(FLUSH_S))
    assert ids_of(read(store, "a")) == [0]


def test_nothing_is_left_to_the_result_if_the_claim_was_lost(store: redis.Redis) -> None:
    lost: list[Claim] = []
    publisher = started(store, lost)
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    claimed(store, "a")
    publisher.append(claim, token(0))
    wait_until(lambda: lost)
    assert publisher.take(claim, patience(FLUSH_S)) is None
    publisher.close()


def test_a_write_finds_the_cancel_that_nobody_heard(store: redis.Redis) -> None:
    cancelled: list[str] = []
    publisher = started(store, cancelled=cancelled)
    claim = claimed(store, "a")
    publisher.open(claim, 1)
    ask_cancel(store, "a")
    publisher.append(claim, token(0))
    wait_until(lambda: cancelled)
    publisher.close()
    assert set(cancelled) == {"a"}
    assert ids_of(read(store, "a")) == [0]


def tokens(choice: int, start: int, count: int) -> Tokens:
    ids = tuple(range(start, start + count))
    return Tokens(choice=choice, index=start, ids=ids, text="".join(f"{i}." for i in ids))


def of_choice(events: list[Event], choice: int) -> list[Tokens]:
    return [event for event in events if isinstance(event, Tokens) and event.choice == choice]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=30))
def test_every_token_stays_once_and_in_order_within_its_choice(
    steps: list[tuple[int, int]],
) -> None:
    counts = [0, 0, 0]
    events: list[Event] = []
    for choice, count in steps:
        events.append(tokens(choice, counts[choice], count))
        counts[choice] += count
    joined = merged(events)
    assert len(joined) == sum(count > 0 for count in counts)
    for choice, count in enumerate(counts):
        parts = of_choice(joined, choice)
        assert [i for part in parts for i in part.ids] == list(range(count))
        assert "".join(part.text for part in parts) == "".join(f"{i}." for i in range(count))


def test_tokens_do_not_move_past_another_kind_of_event() -> None:
    first, second = tokens(0, 0, 1), tokens(0, 1, 1)
    assert merged([first, CancelledEvent(), second]) == [first, CancelledEvent(), second]


def test_tokens_with_a_gap_stay_apart() -> None:
    first, second = tokens(0, 0, 1), tokens(0, 5, 1)
    assert merged([first, second]) == [first, second]


def test_logprobs_are_joined_with_their_tokens() -> None:
    events = [
        tokens(0, i, 1).model_copy(
            update={"logprobs": (TokenLogprobs(id=i, text=str(i), logprob=-1.0),)}
        )
        for i in range(3)
    ]
    (joined,) = merged(events)
    assert isinstance(joined, Tokens)
    assert joined.logprobs is not None
    assert [entry.id for entry in joined.logprobs] == [0, 1, 2]


def test_the_calls_of_joined_tokens_keep_their_parts_in_order() -> None:
    parts = [
        CallPart(index=0, id="a", name="f"),
        CallPart(index=0, arguments='{"x"'),
        CallPart(index=0, arguments=": 1}"),
        CallPart(index=1, id="b", name="g"),
    ]
    events = [tokens(0, i, 1).model_copy(update={"tool_calls": (p,)}) for i, p in enumerate(parts)]
    (joined,) = merged([*events, tokens(0, 4, 1)])
    assert isinstance(joined, Tokens)
    first, second = joined.tool_calls or ()
    assert first == CallPart(index=0, id="a", name="f", arguments='{"x": 1}')
    assert second == parts[-1]
