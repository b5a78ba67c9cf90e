"""The GPU benchmark without a GPU: everything but a card's rates and its profiler."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benches.gpu import __main__ as program
from benches.gpu import device as cards
from benches.gpu.report import Report
from benches.gpu.run import Wanted
from llorch_worker.engine.device import graphs as decode_graphs
from llorch_worker.kernels import find_native_kernels
from tests.benches.program import run_program
from tests.benches.tiny_llama import CPU, RATES, TINY
from tests.engine.recording import Recorder

Measure = Callable[..., Report]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The program for a tiny model on the CPU, with made-up rates and graphs without a card."""
    if find_native_kernels() is None:
        pytest.skip("bfloat16 without native kernels takes long")
    monkeypatch.setattr(cards, "measure_rates", lambda *_: RATES)
    monkeypatch.setattr(decode_graphs, "CudaRecorder", lambda _: Recorder())
    wanted = Wanted(
        config=replace(TINY, num_layers=1),
        weights=("bf16", "q4_k_m"),
        batches=(1, 3),
        contexts=(40,),
        prefills=(20,),
        kv_dtype="auto",
        peer=False,
    )

    def measure(out: Path) -> Report:
        report = Report(sys.stdout, out)
        program.measure(wanted, CPU, report)
        return report

    return measure


def test_the_whole_program_measures_each_case_and_the_ratio_to_bf16(
    measure: Measure, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "figures.jsonl"
    report = measure(out)
    document = report.document
    assert not report.failed, document
    assert capsys.readouterr().out.startswith("$ python -m benches.gpu")
    (origin,) = document["provenance"]
    assert origin["machine"]["device"] == "cpu"
    assert {"torch", "triton", "transformers"} <= origin["versions"].keys()
    runs = [(w, b, g) for w in ("bf16", "q4_k_m") for b in (1, 3) for g in (True, False)]
    assert [(d["weights"], d["batch"], d["graphs"]) for d in document["decode"]] == runs
    dense, quantised = document["decode"][0], document["decode"][4]
    assert dense["times_bf16"] is None
    times = dense["step_ms"] / quantised["step_ms"]
    assert quantised["times_bf16"] == pytest.approx(times)
    assert [p["weights"] for p in document["prefill"]] == ["bf16", "q4_k_m"]
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert kinds[:3] == ["provenance", "device", "model"]
    assert len(kinds) == sum(map(len, document.values()))


def test_the_exit_code_says_whether_something_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fails(wanted: Wanted, device: torch.device, report: Report) -> None:
        with report.attempt("something"):
            raise RuntimeError("it broke")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "measure", fails)
    assert program.gpu(as_json=True) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document == {"failed": [{"what": "something", "error": "RuntimeError: it broke"}]}
    assert printed.err == "failed: something: RuntimeError: it broke\n"
    monkeypatch.setattr(program, "measure", lambda *_: None)
    assert program.gpu() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--weights", "bf16,q7_x"), "unknown weights q7_x"), (("--json",), "needs a CUDA device")],
)
def test_without_cuda_or_known_weights_nothing_is_measured(
    options: tuple[str, ...], said: str
) -> None:
    ran = run_program("benches.gpu", *options, CUDA_VISIBLE_DEVICES="")
    assert ran.code == 2
    assert said in ran.out + ran.err
