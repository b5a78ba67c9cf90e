"""What of the GPU benchmark needs no GPU: all but the rates of a card and what a card would say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benches.gpu import __main__ as program
from benches.gpu import device_rates, run
from benches.gpu.figures import Case, PeerFigures
from benches.gpu.measures import Bench
from benches.gpu.peer import measure_peer
from benches.gpu.report import Report
from llorch_worker.engine.device import graphs as decode_graphs
from llorch_worker.kernels import native_kernels_load
from tests.benches.tiny_llama import CPU, RATES, TINY
from tests.engine.recording import Recorder


def test_a_figure_is_out_before_the_next_is_made(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "figures.jsonl"
    report = Report(sys.stdout, out)
    report.add(RATES)
    assert capsys.readouterr().out.startswith("copy 0.00 TB/s")
    with report.attempt("decode 1 x 128"):
        raise ZeroDivisionError("by nought\nand more")
    assert capsys.readouterr().out == "failed: decode 1 x 128: ZeroDivisionError: by nought\n"
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first == {"kind": "device", **report.document["device"][0]}
    assert second["kind"] == "failed"
    assert report.failed


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The program's arguments for a tiny model on the CPU, with rates and graphs of no card."""
    if not native_kernels_load():
        pytest.skip("bfloat16 without native kernels takes long")
    monkeypatch.setattr(program, "LLAMA_2_7B", TINY)
    monkeypatch.setattr(device_rates, "measure_rates", lambda *_: RATES)
    monkeypatch.setattr(decode_graphs, "CudaRecorder", lambda _: Recorder())
    return ["--layers", "1", "--batches", "1,3", "--contexts", "40", "--prefills", "20"]


def measured(argv: list[str], report: Report) -> dict[str, list[dict[str, Any]]]:
    program.measure(program.arguments(argv), CPU, report)
    return report.document


def test_the_whole_program_measures_each_case_and_the_ratio_to_bf16(
    small: list[str], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "figures.jsonl"
    report = Report(sys.stdout, out)
    document = measured([*small, "--no-peer"], report)
    assert not report.failed, document
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("$ python -m benches.gpu")
    (origin,) = document["provenance"]
    assert origin["machine"]["device"] == "cpu"
    assert {"torch", "triton", "transformers"} <= origin["versions"].keys()
    runs = [(w, b, g) for w in ("bf16", "q4_k_m") for b in (1, 3) for g in (True, False)]
    assert [(d["weights"], d["batch"], d["graphs"]) for d in document["decode"]] == runs
    assert [r["batch"] for r in document["ratio"]] == [1, 1, 3, 3]
    dense, packed = document["decode"][0], document["decode"][4]
    ratio = dense["step_ms"] / packed["step_ms"]
    assert document["ratio"][0]["over"] == "bf16"
    assert document["ratio"][0]["times"] == pytest.approx(ratio)
    assert [p["weights"] for p in document["prefill"]] == ["bf16", "q4_k_m"]
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert kinds[:3] == ["provenance", "device", "model"]
    assert len(kinds) == sum(map(len, document.values()))


def test_a_measure_that_fails_is_told_of_and_the_others_go_on(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Bench.decode

    def fails_with_graphs(self: Bench, case: Case, *, graphs: bool) -> Any:
        if graphs:
            raise KeyError("anything")
        return decode(self, case, graphs=graphs)

    monkeypatch.setattr(Bench, "decode", fails_with_graphs)
    report = Report(sys.stdout)
    document = measured([*small, "--no-peer", "--weights", "bf16"], report)
    assert report.failed
    assert [failure["what"] for failure in document["failed"]] == [
        "decode bf16 1 x 40 with graphs",
        "decode bf16 3 x 40 with graphs",
    ]
    assert len(document["decode"]) == 2
    assert len(document["prefill"]) == 1


def test_a_peer_that_cannot_be_measured_is_skipped(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(run, "measure_peer", absent)
    report = Report(sys.stdout)
    document = measured([*small, "--weights", "bf16"], report)
    assert not report.failed
    (row,) = document["not_measured"]
    assert row["reason"] == "TypeError: unexpected keyword argument"


def test_a_peer_is_compared_with_the_same_work(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PEER_BATCH", 3)
    monkeypatch.setattr(run, "measure_peer", lambda *_, **__: PeerFigures(3, 40, 10.0))
    document = measured([*small, "--weights", "bf16"], Report(sys.stdout))
    (ratio,) = document["ratio"]
    assert (ratio["batch"], ratio["graphs"], ratio["over"]) == (3, True, "transformers")
    ours = document["decode"][2]["tokens_per_s"]
    assert ratio["times"] == pytest.approx(ours / 10)


def test_a_case_that_does_not_fit_is_named(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "free_bytes", lambda _: 17 * 16 * 2 * 2 * 8 * 2)
    document = measured([*small, "--no-peer", "--weights", "bf16"], Report(sys.stdout))
    (row,) = document["not_measured"]
    assert row["what"] == "decode 3 x 40"
    assert {figures["batch"] for figures in document["decode"]} == {1}


def test_the_exit_code_says_whether_something_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fails(given: Any, device: torch.device, report: Report) -> None:
        with report.attempt("something"):
            raise RuntimeError("it broke")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "measure", fails)
    assert program.main(["--json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document == {"failed": [{"what": "something", "error": "RuntimeError: it broke"}]}
    assert printed.err == "failed: something: RuntimeError: it broke\n"
    monkeypatch.setattr(program, "measure", lambda *_: None)
    assert program.main([]) == 0


def test_a_file_that_cannot_be_written_is_told_of_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert program.main(["--out", str(tmp_path)]) == 2
    assert "nothing was measured" in capsys.readouterr().err


def test_weights_of_no_known_kind_are_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        program.main(["--weights", "bf16,q7_x"])
    assert "unknown weights q7_x" in capsys.readouterr().err


def test_transformers_page_size_goes_by_the_name_that_it_has_there() -> None:
    @dataclass
    class Old:
        block_size: int = 256

    @dataclass
    class New:
        page_size: int = 256

    transformers = pytest.importorskip("transformers")
    from benches.peers.contestants.continuous_batching import page_option

    assert page_option(Old) == "block_size"
    assert page_option(New) == "page_size"
    assert page_option(transformers.ContinuousBatchingConfig)


def test_transformers_decodes_the_same_shape() -> None:
    pytest.importorskip("transformers")
    config = replace(TINY, max_context=256)
    figures = measure_peer(config, batch=2, context=20, dtype=torch.float32, device=CPU)
    assert (figures.batch, figures.context_tokens) == (2, 20)
    assert figures.tokens_per_s > 0


def test_without_cuda_it_says_so_and_measures_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benches.gpu", "--json"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs a CUDA device" in done.stderr
