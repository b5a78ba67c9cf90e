"""A model that generates and reads texts: neither changes the other's numbers, nor keeps it
waiting."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llorch_worker.contract import (
    Cancelled,
    DeadlineExceeded,
    EmbedRequest,
    GenerationRequest,
    InvalidRequest,
    RerankRequest,
)
from llorch_worker.engine import Engine
from llorch_worker.engine.any_engine import AnyEngine
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from llorch_worker.engine.generation import Generation
from llorch_worker.engine.shared_core import LEAST_STEPS, SharedCore
from llorch_worker.engine_options import EngineOptions
from tests.decoders import CONTEXT, WIDTH, write_judge

STEP_TOKENS = 64
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_step_tokens": STEP_TOKENS, "drafter": "off",
}  # fmt: skip
TEXTS = [[5 + at % 200, *range(10, 12 + at % 40)] for at in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("generates"), marked=False)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with AnyEngine.load(folder, EngineOptions(pooling="last", **OPTIONS)) as engine:
        assert isinstance(engine, Engine)
        yield engine


class Order:
    """The steps of an engine: ``g`` for one that generates, ``t`` for one of texts. They take no
    time, so that a busy machine changes no order."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = ""
        assert engine._texts is not None
        for core, letter in ((engine._core, "g"), (engine._texts, "t")):
            monkeypatch.setattr(core, "step", self._noted(core.step, letter))
        monkeypatch.setattr(engine._thread._core, "_clock", lambda: 0.0)
        self._engine = engine

    def _noted(self, step: Any, letter: str) -> Any:
        def noted() -> Any:
            done = step()
            self.steps += letter if done.chunks else ""
            return done

        return noted

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step begins meanwhile."""
        began, over = threading.Event(), threading.Event()

        def wait() -> None:
            began.set()
            over.wait()

        waiting = threading.Thread(target=self._engine._thread.call, args=(wait,))
        waiting.start()
        began.wait()
        try:
            yield
        finally:
            over.set()
            waiting.join()

    def together(self, *requests: Any) -> list[Any]:
        """The jobs of these requests, of which no step begins before all are in."""
        with self.held():
            return [self._engine.submit(request) for request in requests]


@pytest.fixture
def order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Order:
    return Order(engine, monkeypatch)


def writing(tokens: int, **fields: Any) -> GenerationRequest:
    fields = {"prompt_token_ids": [7, 8, 9], "seed": 3, "logprobs": 2} | fields
    return GenerationRequest(max_tokens=tokens, ignore_eos=True, **fields)


def told(generation: Generation) -> Any:
    return generation.result().choices


def test_texts_and_generation_have_the_numbers_that_they_have_alone(
    engine: Engine, order: Order, folder: Path
) -> None:
    written = [told(engine.submit(writing(80, seed=seed))) for seed in range(4)]
    vectors = engine.submit(EmbedRequest(input=TEXTS))
    vectors.result()
    order.steps = ""
    *jobs, beside = order.together(
        *(writing(80, seed=seed) for seed in range(4)), EmbedRequest(input=TEXTS)
    )
    assert [told(job) for job in jobs] == written
    beside.result()
    assert torch.equal(beside.values, vectors.values)
    assert "gt" in order.steps
    assert "tg" in order.steps
    with EmbeddingEngine.load(folder, pooling="last", **OPTIONS) as alone:
        expected = alone.submit(EmbedRequest(input=TEXTS))
        expected.result()
    torch.testing.assert_close(beside.values, expected.values)


def test_no_decode_waits_for_two_steps_of_texts(engine: Engine, order: Order) -> None:
    writes, reads = order.together(writing(400), EmbedRequest(input=TEXTS * 2))
    told(writes)
    generated = order.steps[order.steps.index("g") : order.steps.rindex("g")]
    assert "tt" not in generated
    assert "t" in generated, "texts have turns while something is generated"
    reads.result()


@pytest.mark.parametrize(
    ("texts_s", "steps_s", "expected"),
    [
        # Shorter steps generate for as long, and so often that few gaps have a step of texts.
        (1.0, 0.01, 100),
        (0.1, 0.01, LEAST_STEPS),
        (0.01, 0.01, LEAST_STEPS),
        # One that is long pays for many.
        (0.1, 3.5, 1),
    ],
)
def test_a_step_of_texts_is_followed_by_generation(
    texts_s: float, steps_s: float, expected: int
) -> None:
    now_s, order = 0.0, ""

    def step(letter: str, took_s: float) -> Any:
        def taken() -> Any:
            nonlocal now_s, order
            now_s, order = now_s + took_s, order + letter
            return SimpleNamespace(chunks=(1,))

        return taken

    generating: Any = SimpleNamespace(
        has_work=True, step=step("g", steps_s), settle=lambda: None, first_class=1
    )
    texts: Any = SimpleNamespace(
        has_work=True, step=step("t", texts_s), is_urgent=lambda now_s: True, first_class=1
    )
    core = SharedCore(generating, texts, clock=lambda: now_s)
    while order.count("t") < 4:
        core.step()
    # The sums of times are not exact.
    assert {len(between) - expected for between in order.split("t")[1:-1]} <= {0, 1}


def test_low_texts_wait_for_what_is_generated_unless_that_is_low_too(
    engine: Engine, order: Order
) -> None:
    low = EmbedRequest(input=TEXTS, priority="low")
    for priority in ("normal", "low"):
        order.steps = ""
        writes, reads = order.together(writing(100, priority=priority), low)
        told(writes)
        reads.result()
        generated = order.steps[: order.steps.rindex("g")]
        assert ("t" in generated) == (priority == "low")


@pytest.mark.parametrize(
    ("reads", "writes", "goes_first"),
    [
        ("high", "low", True),
        ("high", "normal", True),
        ("normal", "low", True),
        ("high", "high", False),
        ("normal", "high", False),
        ("normal", "normal", False),
        ("low", "low", False),
    ],
)
def test_texts_above_all_that_is_generated_wait_for_one_step_and_others_for_their_share(
    engine: Engine, order: Order, reads: Any, writes: Any, goes_first: bool
) -> None:
    *jobs, texts = order.together(
        *(writing(100, priority=writes, seed=seed) for seed in range(2)),
        EmbedRequest(input=TEXTS, priority=reads),
    )
    for job in (*jobs, texts):
        job.result()
    beside = order.steps[order.steps.index("t") : order.steps.rindex("g")]
    assert "tt" not in beside, "no decode waits for two steps of texts"
    waits = {len(steps) for steps in beside.split("t")[1:-1]}
    assert waits == ({1} if goes_first else {LEAST_STEPS})


def test_high_generation_gives_texts_their_share_though_low_generation_runs_beside_it(
    engine: Engine, order: Order
) -> None:
    requests = writing(100, priority="high"), writing(100, priority="low")
    *others, texts = order.together(*requests, EmbedRequest(input=TEXTS, priority="high"))
    for job in others:
        told(job)
    texts.result()
    first = order.steps.index("t")
    assert order.steps[first + 1 :].startswith("g" * LEAST_STEPS)


def test_low_texts_that_have_waited_long_have_their_share_and_no_more(
    engine: Engine, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._texts is not None
    monkeypatch.setattr(engine._texts, "_low_waits_at_most_s", -math.inf)
    writes, reads = order.together(writing(100), EmbedRequest(input=TEXTS, priority="low"))
    told(writes)
    reads.result()
    first = order.steps.index("t")
    assert order.steps[first + 1 :].startswith("g" * LEAST_STEPS)


def test_a_text_takes_no_more_than_a_step(engine: Engine) -> None:
    assert engine.facts.max_context == CONTEXT
    long = [5] * (STEP_TOKENS + 1)
    with pytest.raises(InvalidRequest, match=f"at most {STEP_TOKENS} tokens") as refused:
        engine.submit(EmbedRequest(input=[[5], long]))
    assert [fault.field for fault in refused.value.faults] == ["input.1"]
    cut = engine.submit(EmbedRequest(input="a" * (STEP_TOKENS + 9), truncate=True))
    assert cut.result().usage.prompt == STEP_TOKENS
    assert len(told(engine.submit(writing(2, prompt_token_ids=long)))) == 1


def test_it_does_what_a_model_of_vectors_does(engine: Engine) -> None:
    assert engine.facts.tasks == (
        "llorch.generate",
        "llorch.embed",
        "llorch.rerank",
        "llorch.score",
    )
    engine.warm_up()
    before = engine.step_figures()
    made = engine.submit(EmbedRequest(input="yes", encoding_format="float")).result()
    assert made.dimensions == WIDTH
    ranked = engine.submit(RerankRequest(query="yes", documents=["no", "yes"])).result()
    assert [each.index for each in ranked.results] == [1, 0]
    figures = engine.step_figures()
    tokens = made.usage.prompt + ranked.usage.prompt
    assert figures.prompt_tokens - before.prompt_tokens == tokens
    assert figures.step_tokens.sum - before.step_tokens.sum == tokens
    assert not engine.misplaced_tensors()


def test_a_job_of_texts_ends_at_its_deadline_and_by_a_cancel_beside_generation(
    engine: Engine, order: Order
) -> None:
    expected = told(engine.submit(writing(50)))
    with order.held():
        writes = engine.submit(writing(50))
        late = engine.submit(EmbedRequest(input=TEXTS, deadline_s=0.001), queued_at=1.0)
        stopped = engine.submit(EmbedRequest(input=TEXTS))
        stopped.cancel()
    for job, error in ((late, DeadlineExceeded), (stopped, Cancelled)):
        with pytest.raises(error):
            job.result()
    assert told(writes) == expected
    engine.check_integrity()


def test_a_failed_step_of_texts_costs_no_generation(
    engine: Engine, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._texts is not None
    expected = told(engine.submit(writing(50)))

    def failing(_: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(engine._texts, "_compute", failing)
    writes, reads = order.together(writing(50), EmbedRequest(input=TEXTS))
    assert told(writes) == expected
    with pytest.raises(Exception, match="RuntimeError"):
        reads.result()
