"""``python -m benches.gpu [--json] [--out FILE]``: the acceptance test of the GPU path on one card.

It makes random weights in the shape of Llama 2 7B on the device, dense and quantised. It measures
decode at several batch sizes and contexts, with and without CUDA graphs, prefill, and transformers'
continuous batching. All are compared with the card's copy bandwidth and matrix rate, measured in
the same run. Each figure is printed as soon as it is measured. Exit code 1: a measurement failed.
To find memory errors, run it under NVIDIA's tool:
``compute-sanitizer python -m benches.gpu --layers 2 --batches 1,3 --contexts 128 --no-peer``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benches.command import main
from benches.gpu import device
from benches.gpu.random_model import LLAMA_2_7B
from benches.gpu.random_weights import DENSE, MIXTURE, NAMES
from benches.gpu.report import Report
from benches.gpu.run import Run, Wanted
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.cli.bench.parameters import parse_numbers
from llorch_worker.cli.options import JsonOption
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.engine.device import graphs
from llorch_worker.engine_options import KvDtype

MOST = 100_000
MEASURED_WITH = ("triton", "transformers")
"""Packages that the figures depend on, besides those of every benchmark."""


def gpu(
    batches: Annotated[str, typer.Option(help="Sequences that decode at once.")] = "1,64,256",
    contexts: Annotated[str, typer.Option(help="Tokens of each.")] = "128,512,1024,2048",
    prefills: Annotated[str, typer.Option(help="Tokens of a prompt.")] = "512,2048",
    layers: Annotated[int, typer.Option(min=1)] = LLAMA_2_7B.num_layers,
    weights: Annotated[str, typer.Option(help=", ".join(NAMES))] = f"{DENSE},{MIXTURE}",
    kv_dtype: Annotated[KvDtype, typer.Option(metavar="TYPE")] = "auto",
    peer: Annotated[bool, typer.Option(help="Measure transformers, too.")] = True,
    as_json: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, writable=True, help="File for each figure, a line of JSON."),
    ] = None,
) -> int:
    """Measure decode and prefill of random models on one card."""
    kinds = tuple(weights.split(","))
    if unknown := sorted(set(kinds) - set(NAMES)):
        raise usage_error(f"unknown weights {', '.join(unknown)}; allowed: {', '.join(NAMES)}")
    wanted = Wanted(
        config=replace(LLAMA_2_7B, num_layers=layers),
        weights=kinds,
        batches=parse_numbers("--batches", batches, MOST),
        contexts=parse_numbers("--contexts", contexts, MOST),
        prefills=parse_numbers("--prefills", prefills, MOST),
        kv_dtype=kv_dtype,
        peer=peer,
    )
    if not torch.cuda.is_available():
        raise usage_error("benches.gpu needs a CUDA device, and torch finds none here")
    # With --json the figures go to stderr, so that the document can be piped.
    report = Report(sys.stderr if as_json else sys.stdout, out)
    measure(wanted, torch.device("cuda:0"), report)
    if as_json:
        print(json.dumps(report.document, indent=2))
    return int(report.failed)


def measure(wanted: Wanted, card: torch.device, report: Report) -> None:
    with report.attempt("the provenance of the figures"):
        origin = provenance(
            device=str(card),
            seed=0,
            program=("python", "-m", "benches.gpu"),
            measured_with=MEASURED_WITH,
        )
        versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        line = f"$ {origin.command}\n  {origin.machine.device}; {versions}"
        report.note("provenance", line, origin.model_dump())
    with report.attempt("everything that needs the device's own rates"):
        rates = device.measure_rates(card, torch.bfloat16)
        report.add(rates)
        Run(wanted, report, rates, device=card, recorder=graphs.CudaRecorder).measure()


if __name__ == "__main__":
    main(gpu, "gpu")
