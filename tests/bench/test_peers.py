"""``llorch bench peers`` measures who is there, and says of the others why not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benches.peers.command import _show as show

from benches.peers.contestants import roster
from benches.peers.contestants.contestant import (
    LLAMA_CPP,
    LLORCH,
    CannotRun,
    Terms,
    Work,
)
from benches.peers.contestants.process import ContestantProcess
from benches.peers.lengths import Lengths
from benches.peers.measures import Plan, measure_peers
from benches.peers.rows import JobsRow, Side
from llorch_worker.bench import peers as peers_figures
from llorch_worker.bench.jobs.mixed_load import JobLoad
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings
from tests.cli.command import run
from tests.cli.test_bad_input import sentence

QUICK = (
    "--batch", "1,3", "--prefill", "40", "--prompt-tokens", "8", "--new-tokens", "6",
    "--passes", "2", "--threads", "1", "--jobs", "4", "--slots", "2",
    "--job-prompt-tokens", "4,8", "--job-new-tokens", "3,5",
)  # fmt: skip
WORK = Work("decode", ((1, 2, 3), (4, 5, 6)), new_tokens=4, seed=0)


def bench(peers: str, *options: str) -> Any:
    ran = run("bench", "peers", "--model", "demo", *QUICK, "--peers", peers, "--json", *options)
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.json


def terms(model: Path) -> Terms:
    return Terms(model, "float32", threads=1, most_sequences=2, context_tokens=16, prefill_tokens=8)


def check(rows: list[Any], peer: str) -> None:
    prefill, single, three = rows
    assert [row["kind"] for row in rows] == ["prefill", "decode", "decode"]
    assert (prefill["prompt_tokens"], single["sequences"], three["sequences"]) == (40, 1, 3)
    for row in rows:
        assert row["peer"] == peer
        assert row["ours"]["tokens_per_s"] > 0
        assert row["theirs"]["tokens_per_s"] > 0
        assert row["ratio"] > 0


def test_transformers_runs_beside_ours() -> None:
    document = bench("transformers")
    check(document["rows"], "transformers")
    assert document["versions"].keys() == {"transformers"}
    assert document["provenance"]["threads"] == document["threads"] == 1


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_runs_beside_ours_at_its_better_setting() -> None:
    document = bench("llama.cpp")
    check(document["rows"], "llama.cpp")
    assert all("attention" in row["theirs"]["note"] for row in document["rows"])


def test_stock_celery_runs_the_same_jobs(redis_url: str) -> None:
    (row,) = bench("stock-celery")["rows"]
    assert (row["kind"], row["peer"], row["jobs"]) == ("jobs", "stock-celery", 4)
    assert row["ratio"] == pytest.approx(row["our_jobs_per_s"] / row["their_jobs_per_s"])


def test_a_peer_that_is_missing_is_a_row_that_says_so() -> None:
    ran = run(
        "bench", "peers", "--model", "demo", *QUICK, "--peers", "llama-server",
        "--llama-server", "/nowhere/llama-server",
    )  # fmt: skip
    assert ran.code == 0, ran
    said = "llama-server, 4 mixed jobs: skipped: there is none at /nowhere/llama-server; give"
    assert said in " ".join(ran.out.split())


def test_a_server_that_does_not_start_is_a_row_with_its_last_words(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'error: no such model'; exit 1\n")
    binary.chmod(0o755)
    (row,) = bench("llama-server", "--llama-server", str(binary))["rows"]
    assert row == {
        "kind": "skipped",
        "peer": "llama-server",
        "what": "4 mixed jobs",
        "reason": "could not start: no such model",
    }


@pytest.mark.parametrize(
    ("peer", "module"), [("llama.cpp", "llama_cpp"), ("transformers", "transformers")]
)
def test_a_package_that_is_missing_is_skipped_with_the_remedy(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, peer: str, module: str
) -> None:
    monkeypatch.setattr(
        roster, "find_spec", lambda name: None if name == module else find_spec(name)
    )
    (row,) = measure_peers(plan(demo_model, peer), _silent).rows
    assert row.kind == "skipped"
    assert "it is not installed: pip install" in row.reason


def test_too_little_memory_is_a_row_that_says_so(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        peers_figures,
        "psutil",
        SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1024)),
    )
    (row,) = measure_peers(plan(demo_model, "transformers-cb"), _silent).rows
    assert row.kind == "skipped"
    assert row.reason.endswith("and 1.0 KiB are free")


def test_a_contestant_that_fails_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(CannotRun, match=r"broken\.gguf"), ContestantProcess(LLORCH, terms(broken)):
        pass


def test_a_contestant_whose_process_dies_says_how(demo_model: Path) -> None:
    with ContestantProcess(LLORCH, terms(demo_model)) as contestant:
        contestant._process.kill()
        with pytest.raises(CannotRun, match="its process was killed by SIGKILL"):
            contestant.run(WORK)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_what_a_library_prints_stays_out_of_ours(
    demo_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ContestantProcess(LLAMA_CPP, terms(demo_model)) as contestant:
        contestant.warm_up(WORK)
        assert contestant.run(WORK).tokens_per_s > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--peers", "vllm"), "--peers knows llama.cpp, transformers"),
        (("--batch", "0"), "--batch must be numbers from 1 to 256"),
        (("--prefill", "99999"), "--prefill must leave room for one token more"),
        (("--job-prompt-tokens", "9,3"), "--job-prompt-tokens must be one number, or LEAST,MOST"),
    ],
)
def test_a_load_that_cannot_be_is_refused(options: tuple[str, str], said: str) -> None:
    assert said in sentence(run("bench", "peers", "--model", "demo", *options), 2)


@pytest.mark.parametrize(
    ("given", "prefill", "prompts", "new"),
    [
        ((), 127, (32, 95), (16, 31)),
        (("job_new_tokens",), 127, (1, 1), (16, 128)),  # no room is left: refused later
        (("prefill", "job_prompt_tokens"), 512, (32, 384), (1, 1)),
    ],
)
def test_lengths_that_were_not_given_are_lowered_to_the_context(
    given: tuple[str, ...], prefill: int, prompts: tuple[int, int], new: tuple[int, int]
) -> None:
    wished = Lengths(512, (32, 384), (16, 128))
    assert wished.fitted(128, given) == Lengths(prefill, prompts, new)
    assert wished.fitted(4096, given) == wished


def test_a_short_context_is_noted_with_the_lengths_that_are_used() -> None:
    command = ("bench", "peers", "--model", "demo", "--peers", "llama-server", "--llama-server")
    ran = run(*command, "/nowhere", "--job-prompt-tokens", "8,300")
    assert ran.code == 0, ran
    note = ran.err.splitlines()[0]
    assert note == "--prefill 511: what the model's context of 512 holds"
    said = sentence(run(*command, "/nowhere", "--job-prompt-tokens", "8,600"), 2)
    assert said.startswith("--job-prompt-tokens and --job-new-tokens must leave room")


def side(spread: float | None) -> Side:
    return Side(tokens_per_s=10.0, spread=spread)


def test_one_pass_has_no_spread_and_a_wide_one_marks_the_ratio(
    demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = measure_peers(plan(demo_model, "llama-server"), _silent)
    row = JobsRow(
        peer="p", jobs=1, ours=side(0.1), theirs=side(0.26), our_jobs_per_s=1, their_jobs_per_s=1,
        ratio=1.5,
    )  # fmt: skip
    single = row.model_copy(update={"ours": side(None), "theirs": side(None), "jobs": 2})

    def shown(*rows: JobsRow) -> list[str]:
        show(Screen(as_json=False), figures.model_copy(update={"rows": rows}))
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    wide, narrow, remark = shown(row, single)[-3:]
    assert wide == "1 job p 10.0 (10%) 10.0 (26%) 1.50*"
    assert narrow == "2 jobs p 10.0 10.0 1.50"
    assert remark == "* passes spread by more than 25%: a rough ratio"
    assert shown(single)[-1] == narrow


def test_a_model_that_is_not_there_is_one_sentence() -> None:
    said = sentence(run("bench", "peers", "--model", "/nowhere/model.gguf"), 1)
    assert "/nowhere/model.gguf does not exist; give a .gguf file" in said


def plan(model: Path, peer: str) -> Plan:
    return Plan(
        settings=Settings(model=model, device="cpu", dtype="float32"),
        peers=(peer,),
        batches=(1,),
        prefill_tokens=8,
        prompt_tokens=4,
        new_tokens=4,
        jobs=JobLoad(jobs=2, prompt_tokens=(4, 4), new_tokens=(2, 2), seed=0),
        slots=2,
        passes=1,
        threads=1,
        llama_server=None,
    )


def _silent(_what: str) -> None: ...
