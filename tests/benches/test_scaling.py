"""``python -m benches.scaling`` measures each size and refuses impossible ones."""

from __future__ import annotations

from tests.benches.program import run_program
from tests.cli.test_bad_input import sentence

QUICK = (
    "--model", "demo", "--queued", "2,6", "--contexts", "32,64", "--prompt-tokens", "4",
    "--new-tokens", "4", "--concurrency", "2", "--passes", "1",
)  # fmt: skip


def test_each_size_has_its_cost_against_the_first() -> None:
    ran = run_program("benches.scaling", *QUICK, "--json")
    assert (ran.code, ran.err) == (0, ""), ran
    document = ran.json
    assert [row["queued"] for row in document["queued"]] == [2, 6]
    assert [row["context_tokens"] for row in document["contexts"]] == [32, 64]
    assert document["queued"][0]["cost"] == document["contexts"][0]["decode_cost"] == 1
    for row in (*document["queued"], *document["contexts"]):
        assert all(value > 0 for key, value in row.items() if key != "spread")
    assert document["provenance"]["command"].startswith("python -m benches.scaling --model demo")


def test_a_context_that_new_tokens_fill_is_refused() -> None:
    said = sentence(run_program("benches.scaling", "--model", "demo", "--contexts", "16"), 2)
    assert said == "each of --contexts must be more than --new-tokens, 16"
