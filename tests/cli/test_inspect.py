"""``llorch inspect`` describes a file with the figures that a worker uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.contract.quantities import human_bytes
from llorch_worker.kernels import find_native_kernels
from tests.cli.command import run


def test_the_figures_are_those_of_the_engine(trained_model: Path) -> None:
    from llorch_worker.engine import Engine

    path = trained_model / "q8_0.gguf"
    options = {"max_sequences": 3, "max_context": 200, "drafter": "suffix"}
    words = [word for n, value in options.items() for word in (f"--{n.replace('_', '-')}", value)]
    ran = run("inspect", path, *map(str, words), "--json")
    assert ran.code == 0, ran
    memory = ran.json["memory"]
    with Engine.load(path, **options) as engine:
        planned = engine.stats().planned_bytes
    assert planned.keys() == {"weights", "kv", "rope", "masks", "workspace"}
    assert {part: memory[f"{part}_bytes"] for part in planned} == planned
    assert memory["process_bytes"] > 0
    assert memory["vocabulary_bytes"] > 0
    beside = memory["process_bytes"] + memory["vocabulary_bytes"] + memory["texts_bytes"]
    assert memory["total_bytes"] == sum(planned.values()) + beside
    assert memory["fits"] is True


def test_a_kv_cache_that_does_not_fit_is_shown_in_full_size(demo_model: Path) -> None:
    asked = 10**15
    memory = run("inspect", "demo", "--kv-cache-bytes", str(asked), "--json").json["memory"]
    assert memory["fits"] is False
    # In whole blocks.
    assert asked - 2**20 < memory["kv_bytes"] <= asked
    assert memory["total_bytes"] > memory["kv_bytes"] > memory["free_bytes"]
    ran = run("inspect", "demo", LLORCH_KV_CACHE_BYTES=str(asked))
    assert ran.code == 1, ran
    said = " ".join(ran.out.split())
    assert "does not fit: kv_cache_bytes asks for 909.5 TiB, but only" in said
    assert said.endswith("beside weights, tables and masks; lower it or free memory")


@pytest.mark.parametrize("asked", [10**12, 10**20])
def test_recent_texts_that_do_not_fit_are_refused(demo_model: Path, asked: int) -> None:
    said = f"suffix_bytes asks for {human_bytes(asked)}, but only"
    ran = run("inspect", "demo", LLORCH_SUFFIX_BYTES=str(asked))
    assert ran.code == 1, ran
    assert f"does not fit: {said}" in " ".join(ran.out.split())
    ran = run("generate", "Once", "--model", str(demo_model), LLORCH_SUFFIX_BYTES=str(asked))
    assert ran.code == 1, ran
    assert said in " ".join(ran.err.split())
    # Nobody keeps texts then.
    ran = run("inspect", "demo", "--drafter", "lookup", "--json", LLORCH_SUFFIX_BYTES=str(asked))
    assert ran.json["memory"]["texts_bytes"] == 0
    assert ran.json["memory"]["fits"] is True


def test_a_kv_cache_too_small_for_one_context_has_a_remedy(demo_model: Path) -> None:
    ran = run("inspect", "demo", "--kv-cache-bytes", "1000")
    assert ran.code == 1, ran
    assert "0 full contexts" in ran.out
    assert " ".join(ran.out.split()).endswith("allows 1000 B; raise it or lower max_context")
    assert "a cache may take" not in ran.out


def test_the_dtype_of_weights_says_which_stay_quantised(trained_model: Path) -> None:
    native = find_native_kernels()
    for file, dtype, kept in (
        ("q8_0.gguf", "bfloat16", "Q8_0, the rest in bfloat16" if native else "bfloat16"),
        ("q8_0.gguf", "float32", "float32"),
        ("f32.gguf", "bfloat16", "bfloat16"),
    ):
        shown = run("inspect", trained_model / file, "--device", "cpu", "--dtype", dtype).out
        (weights,) = [line for line in shown.splitlines() if line.startswith("  weights")]
        assert weights.split("as ")[1].strip() == kept


def test_it_says_whether_the_layers_run_in_one_native_call(trained_model: Path) -> None:
    native = find_native_kernels()
    for dtype, reason in (
        ("bfloat16", None if native else "torch kernels run them"),
        ("float32", "torch kernels run them"),
    ):
        command = ("inspect", trained_model / "q8_0.gguf", "--device", "cpu", "--dtype", dtype)
        memory = run(*command, "--json").json["memory"]
        assert memory["layers_in_one_call"] is (reason is None)
        assert memory["layers_reason"] == reason
        said = f"one operation at a time: {reason}" if reason else "in one native call"
        assert f"the layers of a step run {said}" in run(*command).out


def test_blocks_of_another_size_in_memory_say_their_bits(random_models: Path) -> None:
    if find_native_kernels() is None:
        pytest.skip("needs a processor that keeps blocks as they are")
    for file, kept in (
        ("q4_0.gguf", "Q4_0"),
        ("q4_k.gguf", "Q4_K"),
        # 8 bits, and the file's scales: 8 bits for each 16 weights, 16 for each 256.
        ("q6_k.gguf", "Q6_K in 8.56 bits"),
    ):
        ran = run("inspect", random_models / file, "--device", "cpu", "--dtype", "bfloat16")
        assert f" as {kept}, the rest in bfloat16" in ran.out, ran


def test_how_the_models_makers_sample_is_shown_and_what_is_ignored(
    trained_model: Path, tmp_path: Path
) -> None:
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "min_p": 7}
    folder = folder_with(tmp_path, trained_model / "hf", said)
    document = run("inspect", str(folder), "--json").json
    assert document["generation_config"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (ignored,) = document["generation_config_ignored"]
    assert ignored.startswith("the model's min_p is ignored: ")
    lines = [" ".join(line.split()) for line in run("inspect", str(folder)).out.splitlines()]
    assert "sampling temperature 0.6, top_p 0.95, top_k 20" in lines
    assert any(line.startswith("remarks the model's min_p is ignored") for line in lines)
    assert run("inspect", "demo", "--json").json["generation_config"] == {}


def test_generate_samples_as_the_makers_do_and_says_so(trained_model: Path, tmp_path: Path) -> None:
    said = {"temperature": 0.6, "max_new_tokens": 3}
    folder = folder_with(tmp_path, trained_model / "hf", said)
    ran = run("generate", "Lily", "--model", str(folder), "--json")
    assert ran.json["generation_config"] == {"temperature": 0.6, "max_tokens": 3}
    assert ran.json["usage"]["completion"] <= 3
    ran = run("generate", "Lily", "--model", str(folder), "--max-tokens", "2")
    assert "sampling as the model's makers set it: temperature 0.6\n" in ran.err


def folder_with(to: Path, files: Path, generation_config: dict[str, Any]) -> Path:
    """The model of ``files`` with this ``generation_config.json``."""
    for file in files.iterdir():
        (to / file.name).symlink_to(file)
    (to / "generation_config.json").unlink(missing_ok=True)
    (to / "generation_config.json").write_text(json.dumps(generation_config))
    return to


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_of_a_model_whose_vocabulary_is_malformed_only_the_error_is_printed(
    trained_model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    for file in (trained_model / "hf").iterdir():
        (tmp_path / file.name).symlink_to(file)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition | {"added_tokens": 5}))
    ran = run("inspect", tmp_path, *options)
    assert ran.code == 1, ran
    if options:
        assert "malformed" in ran.json["error"]["message"]
    else:
        assert (ran.out, "malformed" in ran.err) == ("", True)


def test_a_chat_template_that_grows_without_end_costs_inspect_and_generate_nothing(
    trained_model: Path, tmp_path: Path
) -> None:
    """Jinja computes a constant while it compiles, in one call that nothing in Python can end."""
    for file in (trained_model / "hf").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text("{{ 'a' * 30000000000 }}")
    said = "a plain chat is refused: the model's chat template takes more memory than there is"
    ran = run("inspect", tmp_path, "--json")
    assert (ran.code, ran.json["memory"]["fits"]) == (0, True), ran
    assert said in " ".join(ran.err.split())
    ran = run("generate", "Once", "--model", tmp_path, "--max-tokens", "2")
    assert ran.code == 0, ran
    assert said in " ".join(ran.err.split())
