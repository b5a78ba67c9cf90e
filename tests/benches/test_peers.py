"""``python -m benches.peers`` measures the peers that it finds, and says why it skips others."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benches.peers.contestants.contestant import (
    Work,
    rate,
)
from tests.benches.program import run_program
from tests.cli.test_bad_input import sentence

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


NEEDS_LLAMA_CPP = pytest.mark.lacks("needs llama-cpp-python", when=find_spec("llama_cpp") is None)


@pytest.mark.parametrize("peer", ["transformers", pytest.param("llama.cpp", marks=NEEDS_LLAMA_CPP)])
def test_a_peer_is_measured_beside_ours(peer: str) -> None:
    found = document(peer)
    prefill, single, three = rows = found["rows"]
    assert [row["kind"] for row in rows] == ["prefill", "decode", "decode"]
    assert (prefill["prompt_tokens"], single["count"], three["count"]) == (40, 1, 3)
    for row in rows:
        assert row["peer"] == peer
        assert min(row["ours"]["tokens_per_s"], row["theirs"]["tokens_per_s"], row["ratio"]) > 0
        # llama.cpp takes the better of two settings.
        assert ("attention" in row["theirs"]["note"]) == (peer == "llama.cpp")
    assert found["provenance"]["threads"] == found["wanted"]["threads"] == 1
    assert found["provenance"]["command"].startswith("python -m benches.peers --model demo")


@pytest.mark.parametrize(
    ("peer", "kv_dtype"),
    [("transformers", "int8"), pytest.param("llama.cpp", "fp8", marks=NEEDS_LLAMA_CPP)],
)
def test_a_peer_without_such_a_kv_cache_is_skipped(peer: str, kv_dtype: str) -> None:
    (row,) = document(peer, "--kv-dtype", kv_dtype)["rows"]
    assert (row["kind"], row["what"]) == ("skipped", "all")
    assert row["reason"] == f"it has no KV cache in {kv_dtype}"


SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{{}}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"tokens_predicted": sent.get("n_predict")}}).encode())
    do_POST = do_GET
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""In place of llama-server, which few machines have."""


def test_a_server_and_our_queue_run_the_same_jobs(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text(SERVER)
    binary.chmod(0o755)
    (jobs,) = document("llama-server", "--llama-server", str(binary))["rows"]
    assert (jobs["kind"], jobs["peer"], jobs["count"]) == ("jobs", "llama-server", 4)
    assert min(jobs["ours"]["jobs_per_s"], jobs["theirs"]["jobs_per_s"], jobs["ratio"]) > 0


def test_a_server_that_does_not_start_is_skipped_with_its_last_words(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'error: no such model'; exit 1\n")
    binary.chmod(0o755)
    (row,) = document("llama-server", "--llama-server", str(binary))["rows"]
    assert (row["kind"], row["peer"]) == ("skipped", "llama-server")
    assert (row["what"], row["reason"]) == ("4 mixed jobs", "could not start: no such model")


def test_a_decode_is_timed_where_all_sequences_decode() -> None:
    times = ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0])
    assert rate(WORK, 0.5, times).tokens_per_s == pytest.approx(2.0)
    prefill = Work("prefill", WORK.prompts, new_tokens=4, seed=0)
    assert rate(prefill, 0.5, times).tokens_per_s == pytest.approx(6 / 1.5)
    with pytest.raises(RuntimeError, match="did not generate as many tokens"):
        rate(WORK, 0.5, ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0]))
    with pytest.raises(RuntimeError, match="at no time all sequences decode"):
        rate(WORK, 0.5, ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]))


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
