"""``llorch inspect`` tells what a file is, with the figures that the worker will use."""

from __future__ import annotations

from pathlib import Path

from llorch_worker.kernels import native_kernels_load
from tests.cli.command import run


def test_the_figures_are_the_engines_own(stories260k: Path) -> None:
    from llorch_worker.engine import Engine

    path = stories260k / "q8_0.gguf"
    ran = run("inspect", path, "--max-sequences", "3", "--max-context", "200", "--json")
    assert ran.code == 0, ran
    memory = ran.json["memory"]
    with Engine.load(path, max_sequences=3, max_context=200) as engine:
        planned = engine.stats().planned_bytes
    assert planned.keys() == {"weights", "kv", "rope", "masks", "workspace"}
    assert {part: memory[f"{part}_bytes"] for part in planned} == planned
    assert memory["process_bytes"] > 0
    assert memory["total_bytes"] == sum(planned.values()) + memory["process_bytes"]
    assert memory["fits"] is True


def test_a_gguf_file_and_its_folder_are_the_same_model(stories260k: Path) -> None:
    file, folder = (
        run("inspect", stories260k / name, "--json").json for name in ("f32.gguf", "hf")
    )
    for key in ("parameters", "layers", "heads", "kv_heads", "context_tokens", "vocab_size"):
        assert file[key] == folder[key], key
    assert (file["layout"], folder["layout"]) == ("gguf", "hugging_face")


def test_what_does_not_fit_is_said_with_a_remedy(stories260k: Path) -> None:
    ran = run("inspect", stories260k / "q8_0.gguf", "--kv-cache-bytes", "1000")
    assert ran.code == 1, ran
    assert "does not fit" in ran.out
    assert "--max-context" in ran.out


def test_a_person_reads_it_in_80_columns(demo_model: Path) -> None:
    shown = run("inspect", "demo").out
    assert "Memory on cpu, 16 sequences" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80


def test_weights_that_stay_quantised_are_not_said_to_be_in_the_compute_dtype(
    stories260k: Path,
) -> None:
    native = native_kernels_load()
    for file, dtype, kept in (
        ("q8_0.gguf", "bfloat16", "Q8_0, the rest in bfloat16" if native else "bfloat16"),
        ("q8_0.gguf", "float32", "float32"),
        ("f32.gguf", "bfloat16", "bfloat16"),
    ):
        shown = run("inspect", stories260k / file, "--device", "cpu", "--dtype", dtype).out
        (weights,) = [line for line in shown.splitlines() if line.startswith("  weights")]
        assert weights.split("as ")[1].strip() == kept


def test_one_of_a_thing_is_not_a_plural() -> None:
    assert (
        "Memory on cpu, 1 sequence of up to 512 tokens"
        in run("inspect", "demo", "--max-sequences", "1").out
    )
