"""``python -m benches.peers`` measures the peers that it finds, and says why it skips others."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benches.peers.contestants.contestant import (
    LLORCH,
    TRANSFORMERS,
    Terms,
    Work,
    rate,
)
from benches.peers.contestants.process import SERVER
from benches.peers.figures import PeersFigures
from benches.peers.measures import Wanted, measure_peers
from llorch_worker.bench.load import Load
from llorch_worker.bench.plan import Plan
from llorch_worker.contract.command_errors import INTERRUPTED
from llorch_worker.settings import Settings
from tests.benches.program import run_program
from tests.cli.command import environment
from tests.cli.test_bad_input import sentence
from tests.forks import REPOSITORY, Fork
from tests.waiting import wait_until

QUICK = (
    "--batch", "1,3", "--prefill", "40", "--prompt-tokens", "8", "--new-tokens", "6",
    "--passes", "2", "--threads", "1", "--jobs", "4", "--slots", "2",
    "--job-prompt-tokens", "4,8", "--job-new-tokens", "3,5",
)  # fmt: skip
WORK = Work("decode", ((1, 2, 3), (4, 5, 6)), new_tokens=4, seed=0)


def document(peers: str, *options: str) -> Any:
    ran = run_program(
        "benches.peers", "--model", "demo", *QUICK, "--peers", peers, "--json", *options
    )
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.json


def terms(model: Path) -> Terms:
    return Terms(model, "float32", threads=1, most_sequences=2, context_tokens=16, prefill_tokens=8)


NEEDS_LLAMA_CPP = pytest.mark.lacks("needs llama-cpp-python", when=find_spec("llama_cpp") is None)


@pytest.mark.parametrize("peer", ["transformers", pytest.param("llama.cpp", marks=NEEDS_LLAMA_CPP)])
def test_a_peer_decodes_and_prefills_beside_ours(peer: str) -> None:
    found = document(peer)
    prefill, single, three = rows = found["rows"]
    assert [row["kind"] for row in rows] == ["prefill", "decode", "decode"]
    assert (prefill["prompt_tokens"], single["count"], three["count"]) == (40, 1, 3)
    for row in rows:
        assert row["peer"] == peer
        assert min(row["ours"]["tokens_per_s"], row["theirs"]["tokens_per_s"], row["ratio"]) > 0
        # llama.cpp takes the better of two settings.
        assert ("attention" in row["theirs"]["note"]) == (peer == "llama.cpp")
    assert len(found["versions"]) == 1
    assert set(found["memory"]) == {peer, LLORCH}
    assert found["provenance"]["threads"] == found["threads"] == 1
    assert found["provenance"]["command"].startswith("python -m benches.peers --model demo")


@pytest.mark.parametrize(
    ("peer", "kv_dtype"),
    [("transformers", "int8"), pytest.param("llama.cpp", "fp8", marks=NEEDS_LLAMA_CPP)],
)
def test_a_peer_without_such_a_kv_cache_is_skipped(peer: str, kv_dtype: str) -> None:
    (row,) = document(peer, "--kv-dtype", kv_dtype)["rows"]
    assert (row["kind"], row["what"]) == ("skipped", "all")
    assert row["reason"] == f"it has no KV cache in {kv_dtype}"


def test_stock_celery_runs_the_same_jobs() -> None:
    (row,) = document("stock-celery")["rows"]
    assert (row["kind"], row["peer"], row["count"]) == ("jobs", "stock-celery", 4)
    ours, theirs = row["ours"], row["theirs"]
    assert row["ratio"] == pytest.approx(ours["jobs_per_s"] / theirs["jobs_per_s"])


def test_a_server_that_does_not_start_is_skipped_with_its_last_words(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'error: no such model'; exit 1\n")
    binary.chmod(0o755)
    (row,) = document("llama-server", "--llama-server", str(binary))["rows"]
    assert (row["kind"], row["peer"]) == ("skipped", "llama-server")
    assert (row["what"], row["reason"]) == ("4 mixed jobs", "could not start: no such model")


def ignore(_line: str) -> None: ...


def measured(
    model: Path,
    *peers: str,
    passes: int = 1,
    each_line: Callable[[str], None] = ignore,
) -> PeersFigures:
    """The figures of ``peers``, measured in this process."""
    wanted = Wanted(
        peers=peers,
        batches=(2,),
        prefill_tokens=8,
        prompt_tokens=4,
        new_tokens=6,
        jobs=Load.alike(2, 4, 2, seed=0),
        slots=2,
        threads=1,
        llama_server=None,
    )
    plan = Plan(Settings(model=model, device="cpu", dtype="float32"), passes, threads=1)
    return measure_peers(plan, wanted, each_line)


def test_a_decode_is_timed_where_all_sequences_decode() -> None:
    times = ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0])
    assert rate(WORK, 0.5, times).tokens_per_s == pytest.approx(2.0)
    prefill = Work("prefill", WORK.prompts, new_tokens=4, seed=0)
    assert rate(prefill, 0.5, times).tokens_per_s == pytest.approx(6 / 1.5)
    with pytest.raises(RuntimeError, match="did not generate as many tokens"):
        rate(WORK, 0.5, ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0]))
    with pytest.raises(RuntimeError, match="at no time all sequences decode"):
        rate(WORK, 0.5, ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]))


def is_contestant(process: psutil.Process, name: str) -> bool:
    try:
        return [SERVER, name] == process.cmdline()[2:4]
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return False


def kill(name: str) -> None:
    # A run of all tests has children of its own.
    (process,) = (each for each in psutil.Process().children() if is_contestant(each, name))
    process.kill()


def killer(name: str, line: str) -> Callable[[str], None]:
    """Kills that contestant when the line of a pass begins so."""
    return lambda measured: kill(name) if measured.startswith(line) else None


def test_a_peer_that_dies_keeps_what_it_gave_and_costs_no_other_peer_a_row(
    demo_model: Path,
) -> None:
    found = measured(
        demo_model, TRANSFORMERS, "llama-server", passes=2,
        each_line=killer(TRANSFORMERS, "transformers: decode of 2 sequences, pass 1: "),
    )  # fmt: skip
    prefill, decode, skipped, server = found.rows
    assert prefill.kind != "skipped"
    assert decode.kind != "skipped"
    assert (prefill.passes, decode.passes, decode.ours.spread) == (2, 1, None)
    assert skipped.kind == "skipped"
    assert skipped.reason == "its process was killed by SIGKILL"
    assert (server.kind, server.peer) == ("skipped", "llama-server")
    assert re.search(r"^decode x2 +transformers +1 ", text(found), re.MULTILINE)


def text(figures: PeersFigures) -> str:
    console = Console(width=200)
    with console.capture() as shown:
        for part in figures.parts():
            console.print(part)
    return shown.get()


def test_an_interrupted_run_sums_up_the_passes_that_it_finished(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    process = Fork(
        "benches.peers", "--model", "demo", *QUICK, "--passes", "100000", "--peers", "transformers",
        environment=environment(), out=out, err=err, folder=REPOSITORY,
    )  # fmt: skip
    try:
        pass_2 = "transformers: prefill of 40 tokens, pass 2: "
        wait_until(lambda: out.exists() and pass_2 in out.read_text(), timeout_s=120, what=pass_2)
        process.terminate()
        assert process.wait(60) == INTERRUPTED
    finally:
        process.kill()
        process.wait()
    assert re.search(r"^prefill 40 +transformers +\d+ ", out.read_text(), re.MULTILINE)
    assert out.read_text().endswith("interrupted: passes or rows are missing\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--peers", "sglang"), "unknown peer 'sglang'; allowed: llama.cpp, transformers"),
        (("--batch", "0"), "--batch must be numbers from 1 to 256"),
        (("--prefill", "99999"), "--prefill must leave room for one more token"),
        (("--job-prompt-tokens", "9,3"), "--job-prompt-tokens must be one number, or LEAST,MOST"),
    ],
)
def test_an_impossible_load_is_refused(options: tuple[str, str], said: str) -> None:
    assert said in sentence(run_program("benches.peers", "--model", "demo", *options), 2)
