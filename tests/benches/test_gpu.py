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
from benches.gpu.device_trace import idle_share
from benches.gpu.figures import NEW_TOKENS, STEPS, Case, PeerFigures, Rates
from benches.gpu.measures import Bench
from benches.gpu.peer import measure_peer, page_option
from benches.gpu.random_cache import draw_keys_and_values
from benches.gpu.random_model import LLAMA_2_7B, random_llama
from benches.gpu.random_weights import NAMES, RandomWeights
from benches.gpu.report import Report
from benches.gpu.roofline import decode_work, matrix_bytes, prefill_flops
from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import InternalError
from llorch_worker.engine import decode_graphs
from llorch_worker.engine.block_plan import cache_shape
from llorch_worker.kernels import KvForm, TorchOps, native_kernels_load
from llorch_worker.kernels.packed_matrix import PackedMatrix
from llorch_worker.model import Llama, RaggedBatch
from llorch_worker.weights.packed_linear import PackedLinear
from tests.engine.lazy_queue import LazyQueue
from tests.engine.recording import Recorder

CPU = torch.device("cpu")
TINY = replace(
    LLAMA_2_7B,
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=32,
)
RATES = Rates(copy_bytes_per_s=1e9, read_bytes_per_s=None, matrix_flops_per_s=1e9)


def tiny_model(weights: str = "bf16", layers: int = 2) -> Llama:
    config = replace(TINY, num_layers=layers)
    return random_llama(config, TorchOps(), weights=weights, dtype=torch.float32, device=CPU)


def norm_and_embedding_bytes(model: Llama) -> int:
    return (2 * len(model.blocks) + 1) * 32 * 4 + 50 * 32 * 4


@pytest.mark.parametrize("weights", NAMES)
def test_a_random_model_computes_and_counts_its_bytes(weights: str) -> None:
    model = tiny_model(weights)
    shape = cache_shape(TINY, 32, dtype=torch.float32, device=CPU)
    cache = UnifiedCache.allocate(num_blocks=2, **shape)
    row = torch.arange(3)
    batch = RaggedBatch(row, row, (3,), (3,), torch.tensor([[0, 1]]), row, row[2:])
    logits = model.forward(batch, cache)
    assert logits.shape == (1, 50)
    assert bool(logits.isfinite().all())
    assert matrix_bytes(model) == model.weight_bytes - norm_and_embedding_bytes(model)


@pytest.mark.parametrize("weights", [name for name in NAMES if name not in ("bf16", "q4_k_m")])
def test_quantised_matrices_have_the_spread_of_dense_ones(weights: str) -> None:
    drawn = RandomWeights(weights, 1, dtype=torch.bfloat16, device=CPU, seed=0)
    (matrix,) = pieces(drawn.linear(256, ("o", 300)))
    values = matrix.dequantise()
    assert values.shape == (300, 256)
    assert float(values.std()) == pytest.approx(1 / 16, rel=0.1)
    assert abs(float(values.mean())) < 0.6 / 16  # half a step of two bits
    assert drawn.total_bytes == matrix.nbytes


def test_q4_k_m_keeps_six_bits_where_llama_cpp_does() -> None:
    blocks = tiny_model("q4_k_m", layers=16).blocks
    wide = [i for i, block in enumerate(blocks) if pieces(block.mlp.down)[0].bits == 6]
    assert wide == [0, 1, 4, 7, 10, 13, 14, 15]
    for layer, block in enumerate(blocks):
        bits = [piece.bits for piece in pieces(block.attention.qkv)]
        assert bits == ([4, 6] if layer in wide else [4])
        assert [piece.bits for piece in pieces(block.mlp.gate_up)] == [4]
    assert [piece.bits for piece in pieces(tiny_model("q4_k_m").output)] == [6]


def pieces(linear: Any) -> list[PackedMatrix]:
    assert isinstance(linear, PackedLinear)
    return [piece for piece in linear._pieces if isinstance(piece, PackedMatrix)]


def test_a_7b_step_reads_what_is_known_of_it() -> None:
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000)
    work = decode_work(
        LLAMA_2_7B, batch=1, contexts=1000, matrix_bytes=weights, kv_token_bytes=2**19
    )
    assert work.read_bytes == weights + 1000 * 2**19
    assert work.flops == weights + 4 * 32 * 4096 * 1000
    assert work.best_s(1e12, 1e15) == work.read_bytes / 1e12


def test_a_prompt_attends_to_half_of_itself() -> None:
    short, long = (prefill_flops(LLAMA_2_7B, tokens=t) for t in (1000, 2000))
    attention = 4 * 32 * 4096 * (2000 * 2001 // 2 - 2 * (1000 * 1001 // 2))
    assert long - 2 * short == attention - 2 * 4096 * 32000


@pytest.mark.parametrize("form", ["exact", "fp8", "int8"])
def test_a_drawn_cache_holds_finite_numbers_of_the_order_of_one(form: KvForm) -> None:
    shape = cache_shape(TINY, 64, dtype=torch.bfloat16, device=CPU, kv_form=form)
    kv = UnifiedCache.allocate(num_blocks=4, **shape).kv
    draw_keys_and_values(kv)
    for layer in kv.layers:
        for stored, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
            numbers = stored.float()
            if scales is not None:
                numbers = numbers * scales.unsqueeze(-1)
            assert 0.5 < float(numbers.std()) < 2


def tiny_bench(*cases: Case, model: Any = None, queue: Any = None, recorder: Any = None) -> Bench:
    with torch.inference_mode():
        return Bench(
            model or tiny_model(),
            RATES,
            weights="bf16",
            cases=cases,
            longest=max(case.context for case in cases),
            kv_form="exact",
            device=CPU,
            recorder=recorder or Recorder(),
            queue=queue,
        )


def test_steps_are_launched_two_deep_as_the_engine_does() -> None:
    queue = LazyQueue()
    case = Case(3, 40)
    with torch.inference_mode():
        tiny_bench(case, queue=queue).decode(case, graphs=False)
    assert queue.most_unread == 2
    assert queue.unread == 0


def test_the_middle_of_the_timed_steps_holds_the_context_that_was_asked_for() -> None:
    lengths: list[tuple[int, ...]] = []
    model = Noting(tiny_model(), lengths)
    with torch.inference_mode():
        figures = tiny_bench(Case(2, 40), model=model).decode(Case(2, 40), graphs=False)
    decodes = lengths[-4 - STEPS :]  # no profiler runs on a CPU
    assert len(decodes) == 4 + STEPS
    assert decodes[4 + STEPS // 2] == (40, 40)
    assert figures.context_tokens == 40
    work = matrix_bytes(model.model) + 2 * 40 * 2 * 2 * 2 * 8 * 4
    share = work / (figures.step_ms / 1e3) / RATES.copy_bytes_per_s
    assert figures.copy_bandwidth_share == pytest.approx(share)
    assert figures.idle_share is None


class Noting:
    """A model that notes the contexts of its steps."""

    def __init__(self, model: Llama, lengths: list[tuple[int, ...]]) -> None:
        self.model = model
        self._lengths = lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        self._lengths.append(batch.context_lengths)
        return self.model.forward(batch, cache)


def test_graphs_are_replayed_where_they_are_asked_for_and_else_not() -> None:
    recorder = Recorder()
    case = Case(3, 40)
    bench = tiny_bench(case, Case(1, 20), recorder=recorder)
    with torch.inference_mode():
        assert bench.decode(case, graphs=False).tokens_per_s > 0
        assert recorder.replayed == 0
        assert bench.decode(case, graphs=True).tokens_per_s > 0
        assert recorder.replayed == 4 + STEPS
        assert bench.decode(Case(1, 20), graphs=True).context_tokens == 20
        assert bench.prefill(20).tokens_per_s > 0


def test_a_step_that_fails_fails_its_measure_and_not_the_next() -> None:
    lengths: list[tuple[int, ...]] = []
    model = Noting(tiny_model(), lengths)
    case = Case(2, 40)
    bench = tiny_bench(case, model=model)
    working, model.model = model.model, Broken()  # type: ignore[assignment]
    with torch.inference_mode():
        with pytest.raises(InternalError, match="the engine step failed"):
            bench.decode(case, graphs=False)
        with pytest.raises(InternalError, match="the engine step failed"):
            bench.prefill(20)
        model.model = working
        assert bench.decode(case, graphs=False).batch == 2


class Broken:
    def __getattr__(self, name: str) -> Any:
        return getattr(tiny_model(), name)

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        raise RuntimeError("a kernel does not compile")


def test_a_context_shorter_than_the_warm_up_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match="a context of 10 tokens"):
        tiny_bench(Case(1, 20)).decode(Case(1, 10), graphs=False)


def test_idle_is_what_no_kernel_covers() -> None:
    assert idle_share([]) is None
    assert idle_share([(0, 4), (6, 10)]) == pytest.approx(0.2)
    assert idle_share([(6, 10), (0, 8), (1, 2)]) == 0  # side by side, and out of order


def test_sequences_cannot_end_while_they_are_measured() -> None:
    assert NEW_TOKENS > 1 + 4 + 2 * STEPS + 1  # the first, the warm-up, both runs, one ahead


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
    assert lines[0].startswith("$ python -m benches.gpu ")
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
    monkeypatch.setattr(run, "available_bytes", lambda _: 10 * 16 * 2 * 2 * 8 * 2)
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


def test_weights_of_no_known_kind_are_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        program.main(["--weights", "bf16,q7_x"])
    assert "no weights called q7_x" in capsys.readouterr().err


def test_transformers_page_size_goes_by_the_name_that_it_has_there() -> None:
    @dataclass
    class Old:
        block_size: int = 256

    @dataclass
    class New:
        page_size: int = 256

    assert page_option(Old) == "block_size"
    assert page_option(New) == "page_size"
    transformers = pytest.importorskip("transformers")
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
