"""``llorch bench`` prints its figures and their origin, and says what it could not measure."""

from __future__ import annotations

from typing import Any

import pytest

from llorch_worker.bench.engine_figures import EngineFigures
from tests.bench.conftest import Printed
from tests.cli.command import run
from tests.cli.test_bad_input import sentence

QUICK = ("--prompt-tokens", "40", "--new-tokens", "12", "--passes", "2", "--threads", "1")


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def measured(command: str, *options: str, fresh: bool = False, **variables: str) -> Any:
    """The document of ``llorch bench <command>`` with the demo model."""
    ran = run("bench", command, "--model", "demo", *options, "--json", fresh=fresh, **variables)
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.json


@pytest.fixture(scope="module")
def engine_document() -> Any:
    # The cache is as large as the load needs, whatever a worker may keep.
    return measured(
        "engine", *QUICK, "--concurrency", "1,2,3,4", fresh=True, LLORCH_KV_CACHE_BYTES="1000"
    )


def test_every_figure_of_the_engine_is_measured(engine_document: Any) -> None:
    rows = engine_document["rows"]
    assert [row["concurrency"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["preemptions"] == 0
        assert not [note for note in row["notes"] if "no decode" in note]
        assert None not in row.values()
        assert all(n > 0 for key in row.keys() - {"preemptions"} for n in numbers(row[key])), row
        assert row["outside_model_share"] < 1
        latency = row["first_token_ms"]
        assert latency["p50"] <= latency["p95"] <= latency["p99"]
        assert latency["samples"] == 2 * row["concurrency"]
        assert row["between_tokens_ms"]["samples"] == 2 * 11 * row["concurrency"]
    # 40 + 12 tokens, of which the last is never in the cache: 4 blocks of 16.
    single, *_, four = rows
    assert four["kv_peak_bytes"] == 4 * single["kv_peak_bytes"]
    assert four["kv_peak_share"] == pytest.approx(16 / 20)
    assert all(n > 0 for n in numbers(engine_document["ceilings"]))
    assert engine_document["peak_memory_bytes"] > engine_document["weight_bytes"] > 0


def test_figures_name_command_machine_and_versions(engine_document: Any) -> None:
    origin = engine_document["provenance"]
    command = f"llorch bench engine --model demo {' '.join(QUICK)} --concurrency 1,2,3,4 --json"
    assert (origin["command"], origin["threads"], origin["seed"]) == (command, 1, 0)
    assert origin["environment"]["OMP_NUM_THREADS"] == "1"
    assert origin["versions"].keys() >= {"llorch-worker", "python", "torch"}
    assert origin["machine"]["usable_cpus"] >= 1
    assert origin["machine"]["processor"]


def test_the_engines_table_fits_80_columns(engine_document: Any, printed: Printed) -> None:
    lines = printed(EngineFigures.model_validate(engine_document))
    assert lines[0].startswith("$ ")
    for label in ("prefill, tokens/s", "decode, tokens/s", "first token p50, ms", "KV cache"):
        assert [line for line in lines if line.startswith(label)], label
    assert [line for line in lines if line.startswith("  spread of passes")]


def test_figures_that_cannot_be_measured_are_null_with_the_reason(printed: Printed) -> None:
    ran = run(
        "bench", "engine", "--model", "demo", "--prompt-tokens", "40", "--new-tokens", "1",
        "--passes", "1", "--concurrency", "2", "--json", LLORCH_KV_CACHE_BYTES=str(10**15),
    )  # fmt: skip
    (row,) = ran.json["rows"]
    assert row["prefill_tokens_per_s"] > 0
    for figure in (
        "total_spread", "decode_tokens_per_s", "decode_read_bytes_per_s", "between_tokens_ms",
    ):  # fmt: skip
        assert row[figure] is None
    assert "raise --new-tokens" in row["notes"][0]
    lines = printed(EngineFigures.model_validate(ran.json))
    assert not [line for line in lines if "spread" in line], "one pass has none"


@pytest.mark.parametrize("command", ["engine", "queue", "startup"])
def test_a_missing_model_is_one_sentence(command: str) -> None:
    said = sentence(run("bench", command, "--model", "/nowhere/model.gguf"), 1)
    assert "/nowhere/model.gguf does not exist; give a .gguf file" in said


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            ("engine", "--prompt-tokens", "999999"),
            "prompts of 999999 tokens and 32 new ones exceed the model's context",
        ),
        (("queue", "--prompt-tokens", "9999"), "exceed the model's context"),
    ],
)
def test_a_load_beyond_the_context_is_refused_before_the_model_loads(
    command: tuple[str, ...], reason: str
) -> None:
    assert reason in sentence(run("bench", *command, "--model", "demo"), 2)
