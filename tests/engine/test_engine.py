"""What a submitter sees: events, text, stop rules, usage, composition of steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from llorch_worker.contract import (
    Cancelled,
    Event,
    Finished,
    GenerationRequest,
    GenerationResult,
    InternalError,
    Started,
    Tokens,
)
from llorch_worker.engine import Engine
from llorch_worker.engine import thread as engine_thread
from tests.engine.conftest import LoadedModel, continuation
from tests.engine.together import all_at_once
from tests.waiting import wait_until

PROMPT = "Once upon a time"


def generate(engine: Engine, **fields: Any) -> GenerationResult:
    fields = {"prompt": PROMPT, "temperature": 0, **fields}
    return engine.submit(GenerationRequest(**fields)).result(timeout=60)


def texts(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Tokens) and e.choice == choice)


def test_events_tell_the_result_piece_by_piece(engine: Engine) -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=30, n=3, seed=1, metadata={"k": [1]})
    generation = engine.submit(request, job_id="job-1", worker="w@h", attempt=2)
    events = list(generation.events())
    result = generation.result(timeout=60)

    assert isinstance(events[0], Started)
    assert (events[0].worker, events[0].attempt) == ("w@h", 2)
    assert events[0].prompt_tokens == result.usage.prompt == len(engine.tokenizer.encode(PROMPT))
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason == result.choices[0].finish_reason
    assert events[-1].usage == result.usage
    for choice in result.choices:
        ids: list[int] = []
        for event in events[1:-1]:
            assert isinstance(event, Tokens)
            if event.choice == choice.index:
                assert event.index == len(ids)
                ids.extend(event.ids)
        assert tuple(ids) == choice.token_ids
        assert texts(events, choice.index) == choice.text
    assert (result.id, result.worker, result.attempts) == ("job-1", "w@h", 2)
    assert (result.model, result.metadata, result.seed) == (engine.model_name, {"k": [1]}, 1)


def test_chats_and_token_ids_are_prompts_too(engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    by_ids = generate(engine, prompt=None, prompt_token_ids=ids, max_tokens=8)
    assert by_ids.choices == generate(engine, max_tokens=8).choices
    chat = generate(engine, prompt=None, messages=[{"role": "user", "content": "Hi"}], max_tokens=8)
    assert chat.usage.completion > 0


def test_a_stop_string_cuts_the_text_wherever_it_falls(engine: Engine) -> None:
    """Stop strings of every length and place, across token borders."""
    whole = generate(engine, max_tokens=40, ignore_eos=True).text
    for start in range(0, len(whole) - 12, 9):
        stop = whole[start : start + 1 + start % 11]
        generation = engine.submit(
            GenerationRequest(
                prompt=PROMPT, temperature=0, max_tokens=40, ignore_eos=True, stop=stop
            )
        )
        events = list(generation.events())
        result = generation.result(timeout=60)
        assert result.text == texts(events) == whole[: whole.index(stop)]
        assert result.choices[0].finish_reason == "stop"
        seen = continuation(engine.tokenizer, result.choices[0].token_ids)
        assert stop in seen


def test_text_held_back_for_a_stop_string_comes_at_the_end(engine: Engine) -> None:
    whole = generate(engine, max_tokens=12, ignore_eos=True).text
    stop = whole[-3:] + "\N{SNOWMAN}"
    generation = engine.submit(
        GenerationRequest(prompt=PROMPT, temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    )
    assert texts(list(generation.events())) == generation.result(timeout=60).text == whole


def test_a_character_that_never_becomes_whole_is_told_at_the_end(engine: Engine) -> None:
    table = engine.tokenizer.decoding_table
    first_byte = table.token_bytes.index(b"\xe2")
    result = generate(engine, max_tokens=2, logit_bias={first_byte: 100.0})
    assert result.choices[0].token_ids == (first_byte, first_byte)
    assert result.text == "\ufffd\ufffd"


def test_end_of_sequence_ends_without_text(engine: Engine) -> None:
    (eos,) = engine.tokenizer.eos_token_ids
    result = generate(engine, logit_bias={eos: 100.0}, max_tokens=5)
    assert result.choices[0].token_ids == (eos,)
    assert result.text == ""
    assert result.choices[0].finish_reason == "stop"
    ignored = generate(engine, logit_bias={eos: 100.0}, max_tokens=5, ignore_eos=True)
    assert ignored.choices[0].token_ids == (eos,) * 5
    assert ignored.choices[0].finish_reason == "length"


def test_a_stop_token_ends_and_is_in_the_ids_but_not_in_the_text(engine: Engine) -> None:
    ids = generate(engine, max_tokens=20, ignore_eos=True).choices[0].token_ids
    stop = ids[6]
    result = generate(engine, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    end = ids.index(stop)
    assert result.choices[0].token_ids == ids[: end + 1]
    assert result.text == continuation(engine.tokenizer, ids[:end])
    assert result.choices[0].finish_reason == "stop"


def test_min_tokens_outlasts_stop_strings_and_ends(engine: Engine) -> None:
    (eos,) = engine.tokenizer.eos_token_ids
    result = generate(engine, min_tokens=7, max_tokens=20, logit_bias={eos: 100.0})
    assert len(result.choices[0].token_ids) == 8
    whole = generate(engine, max_tokens=20, ignore_eos=True).text
    stopped = generate(engine, max_tokens=20, ignore_eos=True, min_tokens=10, stop=whole[:2])
    assert len(stopped.choices[0].token_ids) > 10


def test_logprobs_come_with_events_and_result(engine: Engine) -> None:
    generation = engine.submit(
        GenerationRequest(prompt=PROMPT, temperature=0, max_tokens=6, logprobs=2)
    )
    events = [event for event in generation.events() if isinstance(event, Tokens)]
    choice = generation.result(timeout=60).choices[0]
    assert choice.logprobs is not None
    assert [entry.id for entry in choice.logprobs] == list(choice.token_ids)
    assert tuple(entry for event in events for entry in event.logprobs or ()) == choice.logprobs
    for entry in choice.logprobs:
        assert entry.top[0].id == entry.id
        assert len(entry.top) == 2
        assert entry.top[0].logprob >= entry.top[1].logprob
        assert entry.text == engine.tokenizer.token_text(entry.id)


def test_timings_add_up_and_the_queue_counts_from_enqueueing(engine: Engine) -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=5)
    timings = engine.submit(request, queued_at=time.time() - 30).result(timeout=60).timings
    assert timings.queue_ms >= 30_000
    assert timings.first_token_ms == pytest.approx(timings.queue_ms + timings.prefill_ms)
    assert timings.prefill_ms > 0
    assert timings.decode_ms > 0
    late = request.model_copy(update={"deadline_s": 10})
    again = engine.submit(late, queued_at=time.time() - 30, retried_at=time.time() - 5)
    result = again.result(timeout=60)
    assert result.choices[0].finish_reason == "deadline", "which counts from the first enqueueing"
    assert 5_000 <= result.timings.queue_ms < 30_000
    ahead = engine.submit(request, queued_at=time.time() + 3_600).result(timeout=60).timings
    assert ahead.queue_ms >= 0


def test_a_long_prompt_stalls_running_decodes_by_no_more_than_one_chunk(
    make_engine: Callable[..., Engine], watched: Callable[..., Any], gate: Callable[..., Any]
) -> None:
    """Told from what each step was made of, not from the clock."""
    hold = gate(at=6)
    model = watched(hold)
    engine = make_engine(model=model, max_step_tokens=32)
    with all_at_once(engine):
        talkers = [
            engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=40, ignore_eos=True))
            for _ in range(3)
        ]
    hold.wait_until_reached()
    long = engine.submit(GenerationRequest(prompt_token_ids=[7] * 300, max_tokens=4))
    short = engine.submit(GenerationRequest(prompt_token_ids=[7], max_tokens=4))
    hold.open()
    for generation in (*talkers, long, short):
        generation.result(timeout=60)
    beside = [step for step in model.steps[1:] if max(step) > 1]
    # 300 tokens beside three decodes in a budget of 32: ten chunks of 29 and one of 10. What has
    # one token comes first, so that attention takes a slice of the block tables, not an index.
    assert beside == [(1, 1, 1, 29)] * 10 + [(1, 1, 1, 1, 10)]
    assert all(sum(step) <= 32 for step in model.steps)


def test_many_threads_submit_and_read_at_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_sequences=5, num_blocks=60)
    expected = generate(engine, max_tokens=15).text
    answers: list[str] = []

    def client() -> None:
        for _ in range(5):
            request = GenerationRequest(prompt=PROMPT, temperature=0, max_tokens=15)
            generation = engine.submit(request)
            assert texts(list(generation.events())) == expected
            answers.append(generation.result(timeout=60).text)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [expected] * 40


def test_stats_count_what_was_done(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    before = engine.stats()
    assert (before.running, before.waiting, before.steps_total) == (0, 0, 0)
    assert before.tokens_per_s == 0
    result = generate(engine, max_tokens=12, ignore_eos=True)
    engine.check_integrity()  # the step that ended the job is over
    stats = engine.stats()
    assert stats.prompt_tokens_total == result.usage.prompt
    assert stats.completion_tokens_total == stats.steps_total == 12
    assert stats.finished_total == 1
    assert stats.tokens_per_s > 0
    assert stats.bytes.keys() == {"weights", "kv", "rope", "masks"}
    assert all(size > 0 for size in stats.bytes.values())
    assert (stats.device, stats.dtype, stats.running) == ("cpu", "float32", 0)


def test_an_idle_engine_sleeps_until_somebody_calls(
    make_engine: Callable[..., Engine],
    watched: Callable[..., Any],
    gate: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread makes one iteration for each call, and none of its own accord."""
    hold = gate(at=2)
    engine = make_engine(model=watched(hold))
    generation = engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=100))
    hold.wait_until_reached()
    generation.cancel()
    hold.open()
    with pytest.raises(Cancelled):
        generation.result(timeout=60)
    iterations = []
    take_inbox = engine._thread._take_inbox

    def counted() -> bool:
        iterations.append(1)
        return take_inbox()

    monkeypatch.setattr(engine._thread, "_take_inbox", counted)
    engine.check_integrity()  # ends the iteration that was under way uncounted
    engine.check_integrity()
    before = len(iterations)
    for _ in range(50):
        engine.check_integrity()
    assert len(iterations) == before + 50


def test_an_idle_engine_that_finds_a_lost_block_counts_as_broken(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "TIDY_AFTER_S", 0.01)
    with loaded.engine() as engine:
        engine.cache.blocks.allocate(1)  # for no sequence
        with suppress(InternalError):  # The engine may look before it has anything to do.
            generate(engine, max_tokens=2)
        wait_until(lambda: not engine.healthy)
        with pytest.raises(InternalError, match="broke down"):
            generate(engine)
        assert engine.stalled_for_s() > 0


def test_a_small_model_computes_with_one_thread(demo_model: Path) -> None:
    caller = torch.get_num_threads()
    with Engine.load(demo_model, max_sequences=1) as engine:
        assert engine._thread.call(torch.get_num_threads) == 1
        assert torch.get_num_threads() == caller
    with Engine.load(demo_model, max_sequences=1, num_threads=caller) as engine:
        assert engine._thread.call(torch.get_num_threads) == caller
