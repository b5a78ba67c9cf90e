"""Dead letters are kept, bounded, and come back with what their jobs had."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest

from llorch_worker.broker import keys, scripts
from llorch_worker.broker.jobs import claims, dead_letters, follow_ups, journal
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.dead_letters import DeadLetter
from llorch_worker.broker.messages.message import ENQUEUED_AT
from llorch_worker.broker.scripts import run_script
from llorch_worker.client import Client, Job
from llorch_worker.contract import (
    AttemptsExhausted,
    Failed,
    InternalError,
    Started,
    Tokens,
)
from llorch_worker.worker.delivery import Delivery
from tests.broker.steps import TERMS, load, sweep, take, weigh
from tests.store import add_letter, clear_letters, follow_ups_in, lose, message_of, store_result

LAPSED = replace(TERMS, lease_ms=-1, max_attempts=2, max_deaths=2)
"""Claims whose worker dies at once."""
STARTED = Started(worker="w@h", model="toy", attempt=1, prompt_tokens=1, queue_ms=0)


def take_lapsed(client: Client, worker: str = "w@h") -> list[Claim]:
    return take(client.redis, LAPSED, worker=worker)


def write(client: Client, claim: Claim, *events: Started | Tokens) -> None:
    page = journal.read(client.redis, claim.job_id)
    with client.redis.pipeline() as pipe:
        scripts.load(client.redis, "append")
        journal.queue_append(pipe, claim, page.next_entry, events)
        assert pipe.execute() == [1]


def die(client: Client, worker: str, *, tokens: bool = True) -> int:
    """Workers take the one job and die, each after a token, until it is dead; how many did."""
    for attempt in range(2 * LAPSED.max_attempts):
        taken = take_lapsed(client, f"{worker}{attempt}@h")
        if not taken:
            return attempt
        (claim,) = taken
        if tokens:
            known = journal.read(client.redis, claim.job_id).journal.choices
            index = len(known[0].token_ids) if known else 0
            write(client, claim, STARTED, Tokens(index=index, ids=(index,), text=f"w{index} "))
        assert sweep(client.redis) == [claim.job_id]
    raise AssertionError("it does not die")


def die_of_attempts(client: Client, *, tokens: bool = True, owner: str = "") -> Job:
    """A job that lost as many workers as it may."""
    job = client.submit(prompt="secret", owner=owner)
    die(client, "w", tokens=tokens)
    return job


def the_letter(client: Client) -> DeadLetter:
    (letter,) = dead_letters.letters(client.redis)
    return letter


def retry(client: Client, letter: DeadLetter) -> str:
    return dead_letters.retry(client.redis, letter)


def test_a_job_out_of_attempts_becomes_a_letter_with_its_history(producer: Client) -> None:
    job = producer.submit(prompt="secret")
    deaths = die(producer, "w")
    with pytest.raises(AttemptsExhausted):
        job.result(timeout=0)
    letter = the_letter(producer)
    assert (letter.id, letter.model, letter.attempts) == (job.id, "toy", LAPSED.max_attempts)
    assert letter.reason == "attempts exhausted"
    assert [worker for worker, _ in letter.history] == [f"w{n}@h" for n in range(deaths)]
    times = [at_ms for _, at_ms in letter.history]
    assert sorted(times) == times
    assert times[-1] <= letter.died_ms
    assert letter.message_bytes == len(letter.message) > 100
    assert letter.message not in repr(letter)
    assert "raw" not in repr(letter)


def test_a_retried_job_goes_on_from_its_journal_with_all_attempts(producer: Client) -> None:
    job = producer.submit(prompt="secret")
    known = die(producer, "w")
    seen = list(job.stream(timeout=30))
    assert isinstance(seen[-1].event, Failed)
    assert retry(producer, the_letter(producer)) == "retried"
    assert dead_letters.count(producer.redis) == 0
    assert job.status().state == "queued"

    (claim,) = take_lapsed(producer)
    assert (claim.job_id, claim.attempt, claim.suspect) == (job.id, 1, False)
    page = journal.read(producer.redis, job.id)
    assert page.journal.choices[0].token_ids == tuple(range(known))
    assert page.journal.terminal is None
    write(producer, claim, STARTED, Tokens(index=known, ids=(known,), text="on"))
    claims.fail(producer.redis, claim, InternalError("again"), LAPSED)
    events = [entry.event for entry in job.stream(timeout=30)]
    assert [i for e in events if isinstance(e, Tokens) for i in e.ids] == list(range(known + 1))
    assert sum(isinstance(event, Failed) for event in events) == 1
    # A reader that had read up to the old end misses no token either.
    later = [entry.event for entry in job.stream(from_id=seen[-1].entry_id, timeout=30)]
    assert [i for e in later if isinstance(e, Tokens) for i in e.ids] == [known]


def test_a_retried_job_waits_since_its_retry_and_its_deadline_counts_from_the_start(
    producer: Client,
) -> None:
    hour_ago_s = time.time() - 3_600
    job = producer.submit(prompt="x")
    message = message_of(producer.redis, job.id)
    old = re.sub(rf'(?<="{ENQUEUED_AT}": )[\d.]+', str(hour_ago_s), message)
    producer.redis.set(keys.message(job.id), old)
    (claim,) = take_lapsed(producer)
    assert claim.retried_ms is None
    dead_letters.refuse(producer.redis, claim, "died", InternalError("died"), TERMS)
    retry(producer, the_letter(producer))
    oldest_s = load(producer.redis).queues["normal"].oldest_s
    assert oldest_s is not None
    assert oldest_s < 1_800
    (claim,) = take_lapsed(producer)
    delivery = Delivery(claim, enqueued_at_s=hour_ago_s)
    assert delivery.queued_at_s() == pytest.approx(hour_ago_s, abs=60)
    assert delivery.retried_at_s() == pytest.approx(time.time(), abs=60)


def test_a_retried_job_without_journal_starts_anew(producer: Client) -> None:
    job = die_of_attempts(producer, tokens=False)
    assert retry(producer, the_letter(producer)) == "retried"
    (claim,) = take_lapsed(producer)
    claims.fail(producer.redis, claim, InternalError("again"), LAPSED)
    with pytest.raises(InternalError, match="again"):
        job.result(timeout=0)
    (entry,) = job.stream(timeout=30)
    assert isinstance(entry.event, Failed)


def test_a_retried_job_that_dies_again_keeps_the_whole_history(
    producer: Client,
) -> None:
    job = producer.submit(prompt="secret")
    first = die(producer, "w")
    retry(producer, the_letter(producer))
    assert die(producer, "later") == first
    letter = the_letter(producer)
    assert letter.id == job.id
    workers = [worker for worker, _ in letter.history]
    assert workers == [
        *(f"w{n}@h" for n in range(first)), "(retried)", *(f"later{n}@h" for n in range(first)),
    ]  # fmt: skip


def test_a_retried_job_is_charged_by_the_weight_of_its_tenant(producer: Client) -> None:
    weigh(producer.redis, "heavy=4")
    charged = {}
    for tenant in ("heavy", "light"):
        job = producer.submit(prompt="secret", tenant=tenant)
        die(producer, "w", tokens=False)
        assert retry(producer, the_letter(producer)) == "retried"
        starts = producer.redis.zscore(keys.waiting("toy"), job.id)
        charged[tenant] = producer.redis.zscore(keys.shares("toy"), f"1/{tenant}") - starts
        take(producer.redis, limit=1)
    assert charged["light"] == pytest.approx(4 * charged["heavy"], rel=0.05)


def test_a_letter_is_retried_once(producer: Client) -> None:
    die_of_attempts(producer)
    letter = the_letter(producer)
    assert retry(producer, letter) == "retried"
    assert retry(producer, letter) == "under way"
    take_lapsed(producer)
    assert retry(producer, letter) == "under way"
    assert producer.redis.llen("llorch.toy") == 0


def test_a_dropped_letter_is_gone_and_its_job_stays_failed(producer: Client) -> None:
    job = die_of_attempts(producer)
    letter = the_letter(producer)
    assert dead_letters.drop(producer.redis, letter)
    assert not dead_letters.drop(producer.redis, letter)
    assert retry(producer, letter) == "gone"
    assert job.status().state == "failed"


def test_a_letter_of_a_job_with_another_end_is_not_retried(producer: Client) -> None:
    job = die_of_attempts(producer)
    store_result(producer.redis, job.id, '{"status": "SUCCESS"}')
    assert retry(producer, the_letter(producer)) == "ended"
    assert dead_letters.count(producer.redis) == 1


def test_a_letter_is_retried_after_all_else_of_its_job_expired(producer: Client) -> None:
    job = die_of_attempts(producer)
    lose(producer.redis, job.id)
    assert retry(producer, the_letter(producer)) == "retried"
    assert job.status().state == "queued"
    assert [claim.job_id for claim in take_lapsed(producer)] == [job.id]


def test_a_letter_is_retried_at_maxmemory(producer: Client) -> None:
    die_of_attempts(producer)
    producer.redis.config_set("maxmemory", 1)
    try:
        assert retry(producer, the_letter(producer)) == "retried"
    finally:
        producer.redis.config_set("maxmemory", 0)


def test_a_malformed_letter_has_its_own_id_and_cannot_be_retried(producer: Client) -> None:
    producer.redis.lpush("llorch.toy", b"no json", b"\xff\xfe")
    assert take_lapsed(producer) == []
    first, second = dead_letters.letters(producer.redis)
    assert first.id != second.id
    assert first.id.startswith("malformed-")
    assert not first.retriable
    assert dead_letters.find(producer.redis, second.id) == second
    assert dead_letters.find(producer.redis, "malformed-") is None


def test_letters_are_found_by_their_ids(producer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_LETTERS", 2)
    jobs = [producer.submit(prompt="x", metadata={"é": n}) for n in range(5)]
    for claim in take(producer.redis):
        dead_letters.bury(producer.redis, claim, "for a reason", TERMS)
    producer.redis.lpush("llorch.toy", b"no json")
    take_lapsed(producer)
    whole = list(dead_letters.letters(producer.redis))
    wanted = [jobs[1].id, whole[0].id, "unknown"]
    found = dead_letters.find_all(producer.redis, wanted)
    assert list(found.values()) == [whole[0], *(it for it in whole if it.id == jobs[1].id)]


def test_the_oldest_letters_are_forgotten(
    producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An owner has a quarter.
    monkeypatch.setattr(claims, "MOST_DEAD_LETTERS", 12)
    for number in range(5):
        producer.redis.lpush("llorch.toy", f"no json {number}")
        take_lapsed(producer)
    assert [it.message for it in dead_letters.letters(producer.redis)] == [
        "no json 4", "no json 3", "no json 2",
    ]  # fmt: skip
    job = producer.submit(prompt="x")
    (claim,) = take_lapsed(producer)
    assert dead_letters.bury(producer.redis, claim, "for a reason", TERMS)
    newest, *rest = dead_letters.letters(producer.redis)
    assert (newest.id, newest.reason, newest.attempts) == (job.id, "for a reason", 1)
    assert [worker for worker, _ in newest.history] == ["w@h"]
    assert len(rest) == 2


MOST_BYTES = 200_000


def bury_of(client: Client, name: str, chars: int, **sender: str) -> None:
    """A dead letter of this name, and of about so many bytes as base64 makes of them."""
    client.submit(prompt="x" * (chars * 3 // 4), job_id=name, **sender)
    (claim,) = take(client.redis)
    assert dead_letters.bury(
        client.redis, claim, "for a reason", replace(TERMS, dead_letters_bytes=MOST_BYTES)
    )


def kept(client: Client) -> list[str]:
    letters = list(dead_letters.letters(client.redis))
    assert sum(len(letter.raw) for letter in letters) <= MOST_BYTES
    assert client.redis.hlen(keys.LETTERS) == len(letters)
    return [letter.id for letter in letters]


def test_a_keys_letters_have_a_quarter_of_the_bytes_and_its_oldest_go_first(
    producer: Client,
) -> None:
    for number in range(20):
        bury_of(producer, f"a{number}", 10_000, owner="a")
    assert kept(producer) == ["a19", "a18", "a17", "a16"]
    bury_of(producer, "large", 40_000, owner="a")
    assert kept(producer) == ["large"]


@pytest.mark.parametrize("others", [{"owner": "flood"}, {"tenant": "flood"}, {}], ids=str)
def test_nobodys_letters_push_out_those_of_another_within_his_share(
    producer: Client, others: dict[str, str]
) -> None:
    for number in range(2):
        bury_of(producer, f"mine{number}", 10_000, owner="me")
    for number in range(30):
        bury_of(producer, f"flood{number}", 10_000, **others)
    assert kept(producer)[-2:] == ["mine1", "mine0"]
    assert len(kept(producer)) == 6


def test_of_many_keys_those_with_most_letters_lose_some(producer: Client) -> None:
    for number in range(4):
        for key in "abcdef":
            bury_of(producer, f"{key}{number}", 10_000, owner=key)
    left = kept(producer)
    counts = {key: sum(name[0] == key for name in left) for key in "abcdef"}
    assert set(counts.values()) <= {2, 3}
    bury_of(producer, "new", 10_000, owner="new")
    assert "new" in kept(producer)


def test_a_message_above_a_share_leaves_a_letter_without_it(producer: Client) -> None:
    bury_of(producer, "small", 1_000, owner="a")
    bury_of(producer, "huge", 100_000, owner="a")
    huge, small = dead_letters.letters(producer.redis)
    assert (huge.id, huge.message, huge.is_kept, huge.retriable) == ("huge", "", False, False)
    assert huge.message_bytes > 100_000
    assert small.is_kept


def test_many_short_letters_of_one_key_leave_room_for_others(
    producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MOST_DEAD_LETTERS", 40)
    bury_of(producer, "mine", 10, owner="me")
    for number in range(50):
        bury_of(producer, f"flood{number}", 10, owner="flood")
    assert kept(producer) == [*(f"flood{number}" for number in range(49, 39, -1)), "mine"]


def test_a_letter_that_is_retried_or_dropped_leaves_nothing(producer: Client) -> None:
    for name in ("a", "b"):
        bury_of(producer, name, 10)
    for letter in list(dead_letters.letters(producer.redis)):
        lose(producer.redis, letter.id)
        assert letter.id == "a" or dead_letters.drop(producer.redis, letter)
        assert letter.id == "b" or retry(producer, letter) == "retried"
    assert not producer.redis.exists(keys.DEAD, keys.LETTERS, keys.LETTERS_HELD)


def test_letters_that_somebody_deleted_are_not_counted_on(producer: Client) -> None:
    for number in range(4):
        bury_of(producer, f"a{number}", 10_000, owner="a")
    producer.redis.delete(keys.DEAD)
    for number in range(5):
        bury_of(producer, f"b{number}", 10_000, owner="a")
    assert kept(producer) == ["b4", "b3", "b2", "b1"]


def test_a_claim_that_was_lost_buries_nothing(producer: Client) -> None:
    producer.submit(prompt="x")
    (claim,) = take_lapsed(producer)
    sweep(producer.redis)
    assert not dead_letters.bury(producer.redis, claim, "late", TERMS)
    assert dead_letters.count(producer.redis) == 0


def test_a_retried_job_keeps_its_idempotency_key(producer: Client) -> None:
    job = producer.submit(prompt="x", idempotency_key="k")
    die(producer, "w", tokens=False)
    assert retry(producer, the_letter(producer)) == "retried"
    assert producer.redis.ttl(keys.idempotency("toy", "k")) == -1
    assert producer.submit(prompt="x", idempotency_key="k").id == job.id


def test_a_retried_job_leaves_a_key_that_is_another_jobs_by_now(producer: Client) -> None:
    producer.submit(prompt="x", idempotency_key="k")
    die(producer, "w", tokens=False)
    key = keys.idempotency("toy", "k")
    producer.redis.delete(key)
    other = producer.submit(prompt="x", idempotency_key="k")
    (claim,) = take(producer.redis)
    assert retry(producer, the_letter(producer)) == "retried"
    (retried,) = take(producer.redis)
    assert claims.end(producer.redis, retried, TERMS)
    assert (producer.redis.get(key), producer.redis.ttl(key)) == (other.id, -1)
    assert claims.end(producer.redis, claim, TERMS)


def test_a_late_follow_up_of_the_old_end_leaves_a_retried_job_alone(producer: Client) -> None:
    job = die_of_attempts(producer)
    (ended,) = follow_ups.take(producer.redis, 60)
    assert retry(producer, the_letter(producer)) == "retried"
    # As Celery follows up: it stores the end once more.
    assert (
        run_script(producer.redis, "finish", [ended.job_id, "", ended.document, 60, "end", 60, ""])
        == 0
    )
    assert job.status().state == "queued"
    assert die(producer, "later")
    follow_ups.note_done(producer.redis, ended.job_id, 60, ended.fence)
    assert follow_ups_in(producer.redis).get(ended.job_id) is not None, "that is another end"


@pytest.mark.parametrize("odd", ["{}", "{not json", "7", '{"id": 7}', '{"history": "x"}'])
def test_an_entry_that_is_no_letter_hides_no_other_and_can_be_dropped(
    producer: Client, odd: str
) -> None:
    job = die_of_attempts(producer)
    add_letter(producer.redis, odd)
    strange, known = dead_letters.letters(producer.redis)
    assert (strange.reason, strange.retriable, known.id) == (dead_letters.MALFORMED, False, job.id)
    letter = dead_letters.find(producer.redis, strange.id)
    assert letter is not None
    assert letter.message == odd
    assert dead_letters.drop(producer.redis, letter)
    assert the_letter(producer).id == job.id


def test_only_workers_that_died_with_the_job_are_lost(client: Client) -> None:
    clear_letters(client.redis)
    history = "gone@h 1000\nback@h 2000\nlast@h 3000\n"
    known = {"list": "llorch.toy", "attempts": 3, "history": history, "at_ms": 4, "message": "x"}
    for number, reason in enumerate((dead_letters.EXHAUSTED, "the message names no task")):
        add_letter(client.redis, json.dumps({**known, "id": str(number), "reason": reason}))
    refused, exhausted = dead_letters.letters(client.redis)
    # A worker that lives since then was not lost, and one that began later is another of its name.
    living = {"back@h": 2.5, "last@h": 0.5}
    assert exhausted.lost_workers(living) == ["gone@h", "back@h"]
    assert exhausted.lost_workers({}) == ["gone@h", "back@h", "last@h"]
    assert refused.lost_workers({}) == ["gone@h", "back@h"]
    clear_letters(client.redis)
