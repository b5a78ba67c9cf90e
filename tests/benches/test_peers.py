"""``python -m benches.peers`` measures the peers that are here, and says why others are not."""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benches.peers.contestants import roster
from benches.peers.contestants.contestant import LLAMA_CPP, LLORCH, CannotRun, Terms, Work
from benches.peers.contestants.process import ContestantProcess
from benches.peers.lengths import Lengths
from benches.peers.measures import Plan, measure_peers
from llorch_worker.bench.jobs.mixed_load import MixedLoad
from llorch_worker.settings import Settings
from tests.benches.program import run_program
from tests.cli.command import Ran
from tests.cli.test_bad_input import sentence

QUICK = (
    "--batch", "1,3", "--prefill", "40", "--prompt-tokens", "8", "--new-tokens", "6",
    "--passes", "2", "--threads", "1", "--jobs", "4", "--slots", "2",
    "--job-prompt-tokens", "4,8", "--job-new-tokens", "3,5",
)  # fmt: skip
WORK = Work("decode", ((1, 2, 3), (4, 5, 6)), new_tokens=4, seed=0)


def bench(*options: str) -> Ran:
    return run_program("benches.peers", "--model", "demo", *QUICK, *options)


def document(peers: str, *options: str) -> Any:
    ran = bench("--peers", peers, "--json", *options)
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
    found = document("transformers")
    check(found["rows"], "transformers")
    assert found["versions"].keys() == {"transformers"}
    assert found["provenance"]["threads"] == found["threads"] == 1
    assert found["provenance"]["command"].startswith("python -m benches.peers --model demo")


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_runs_beside_ours_at_its_better_setting() -> None:
    rows = document("llama.cpp")["rows"]
    check(rows, "llama.cpp")
    assert all("attention" in row["theirs"]["note"] for row in rows)


def test_stock_celery_runs_the_same_jobs() -> None:
    (row,) = document("stock-celery")["rows"]
    assert (row["kind"], row["peer"], row["jobs"]) == ("jobs", "stock-celery", 4)
    assert row["ratio"] == pytest.approx(row["our_jobs_per_s"] / row["their_jobs_per_s"])


def test_a_server_that_does_not_start_is_a_row_with_its_last_words(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'error: no such model'; exit 1\n")
    binary.chmod(0o755)
    (row,) = document("llama-server", "--llama-server", str(binary))["rows"]
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
        psutil, "virtual_memory", lambda: SimpleNamespace(available=1024, total=1024)
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
        (process,) = multiprocessing.active_children()
        process.kill()
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
        (("--peers", "vllm"), "unknown peer 'vllm'; allowed: llama.cpp, transformers"),
        (("--batch", "0"), "--batch must be numbers from 1 to 256"),
        (("--prefill", "99999"), "--prefill must leave room for one more token"),
        (("--job-prompt-tokens", "9,3"), "--job-prompt-tokens must be one number, or LEAST,MOST"),
    ],
)
def test_a_load_that_cannot_be_is_refused(options: tuple[str, str], said: str) -> None:
    assert said in sentence(run_program("benches.peers", "--model", "demo", *options), 2)


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


def test_a_person_reads_what_was_lowered_and_why_a_peer_is_missing() -> None:
    ran = run_program(
        "benches.peers", "--model", "demo", "--peers", "llama-server",
        "--llama-server", "/nowhere", "--job-prompt-tokens", "8,300",
    )  # fmt: skip
    assert ran.code == 0, ran
    assert ran.err.splitlines()[0] == "--prefill 511, to fit the model's context of 512"
    said = "llama-server, 64 mixed jobs: skipped: not found at /nowhere; give --llama-server"
    assert said in " ".join(ran.out.split())


def plan(model: Path, peer: str) -> Plan:
    return Plan(
        settings=Settings(model=model, device="cpu", dtype="float32"),
        peers=(peer,),
        batches=(1,),
        prefill_tokens=8,
        prompt_tokens=4,
        new_tokens=4,
        jobs=MixedLoad(jobs=2, prompt_tokens=(4, 4), new_tokens=(2, 2), seed=0),
        slots=2,
        passes=1,
        threads=1,
        llama_server=None,
    )


def _silent(_what: str) -> None: ...
