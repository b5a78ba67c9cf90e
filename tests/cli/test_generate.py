"""``llorch generate``: text without a queue."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command import run


def test_a_pipe_gets_only_the_text_and_the_same_for_the_same_seed(demo_model: Path) -> None:
    options = ("generate", "--max-tokens", "30", "--seed", "7", "--model", "demo")
    argument, standard_input = run(*options, "Lily", fresh=True), run(*options, "-", stdin="Lily")
    assert argument.code == 0, argument
    assert argument.out == standard_input.out != ""
    assert argument.out[:4] != "Lily"
    assert "demo: 30 tokens" in argument.err


def test_json_is_the_result_with_every_choice(demo_model: Path) -> None:
    ran = run("generate", "The king", "-n", "2", "--max-tokens", "6", "--stop", "zzz", "--json")
    assert (ran.code, ran.err) == (0, ""), ran
    assert [choice["index"] for choice in ran.json["choices"]] == [0, 1]
    assert ran.json["usage"]["completion"] <= 12


def test_a_chat_goes_through_the_models_format(demo_model: Path) -> None:
    ran = run("generate", "Tell me a story", "--system", "Be brief", "--max-tokens", "4", "--json")
    assert ran.code == 0, ran
    assert ran.json["usage"]["prompt"] > 10


def test_the_model_has_the_name_that_a_worker_gives_it(demo_model: Path) -> None:
    ran = run("generate", "Lily", "--max-tokens", "2", "--json", LLORCH_MODEL_NAME="tales")
    assert ran.json["model"] == "tales"


def test_where_no_file_says_how_it_samples_narrowly_and_says_so(demo_model: Path) -> None:
    options = ("generate", "Lily", "--max-tokens", "20", "--seed", "7")
    ran = run(*options)
    assert "sampling: temperature 0.7, top_p 0.95\n" in ran.err
    named = run(*options, "-t", "0.7", "--top-p", "0.95")
    assert (named.out, "sampling" in named.err) == (ran.out, False)
    assert "sampling: temperature 1.5, top_p 0.95\n" in run(*options, "-t", "1.5").err
    assert "sampling" not in run(*options, "-t", "0").err
