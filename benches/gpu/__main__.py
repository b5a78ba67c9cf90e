"""``python -m benches.gpu [--json] [--out FILE]``: the acceptance test of the GPU path on one card.

It makes random weights in the shape of Llama 2 7B on the device, dense and quantised. It measures
decode at several batch sizes and contexts, with and without CUDA graphs, prefill, and transformers'
continuous batching. All are compared with the card's copy bandwidth and matrix rate, measured in
the same run. Each figure is printed as soon as it is measured. Exit code 1: a measurement failed.
To find memory errors, run it under NVIDIA's tool:
``compute-sanitizer python -m benches.gpu --layers 2 --batches 1,3 --contexts 128 --no-peer``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benches.gpu.random_model import LLAMA_2_7B
from benches.gpu.random_weights import DENSE, MIXTURE, NAMES
from benches.gpu.report import Report

NO_CUDA = "benches.gpu needs a CUDA device, and torch finds none here; nothing was measured"
MEASURED_WITH = ("triton", "transformers")
"""Packages that the figures depend on, besides those of every benchmark."""


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers from 1 up, such as ``1,8,16``."""
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return numbers


def weight_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(
            f"unknown weights {', '.join(sorted(unknown))}; allowed: {', '.join(NAMES)}"
        )
    return names


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.gpu")
    parser.add_argument("--batches", type=whole_numbers, default=(1, 64, 256))
    parser.add_argument("--contexts", type=whole_numbers, default=(128, 512, 1024, 2048))
    parser.add_argument("--prefills", type=whole_numbers, default=(512, 2048))
    parser.add_argument("--layers", type=int, default=LLAMA_2_7B.num_layers)
    parser.add_argument(
        "--weights", type=weight_names, default=(DENSE, MIXTURE), help=", ".join(NAMES)
    )
    parser.add_argument("--kv-dtype", choices=("auto", "fp8", "int8"), default="auto")
    parser.add_argument("--no-peer", action="store_true", help="skip transformers")
    parser.add_argument("--json", action="store_true", help="print one document at the end")
    parser.add_argument("--out", type=Path, help="file for each figure, as a line of JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    if not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 2
    device = torch.device("cuda:0")
    # With --json the figures go to stderr, so that the document can be piped.
    try:
        report = Report(sys.stderr if given.json else sys.stdout, given.out)
    except OSError as error:
        print(f"--out {given.out}: {error.strerror}; nothing was measured", file=sys.stderr)
        return 2
    measure(given, device, report)
    if given.json:
        print(json.dumps(report.document, indent=2))
    return 1 if report.failed else 0


def measure(given: argparse.Namespace, device: torch.device, report: Report) -> None:
    """Runs the requested measurements on ``device``."""
    # Imported late, because these modules need a card or compile for one.
    from benches.gpu.device_rates import measure_rates
    from benches.gpu.run import Plan, Run
    from llorch_worker.bench.instruments.provenance import provenance
    from llorch_worker.engine.device.graphs import CudaRecorder

    with report.attempt("the provenance of the figures"):
        origin = provenance(
            device=str(device),
            seed=0,
            program=("python", "-m", "benches.gpu"),
            measured_with=MEASURED_WITH,
        )
        versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        line = f"$ {origin.command}\n  {origin.machine.device}; {versions}"
        report.note("provenance", origin.model_dump(), line)
    with report.attempt("everything that needs the device's own rates"):
        rates = measure_rates(device, torch.bfloat16)
        report.add(rates)
        plan = Plan(
            config=replace(LLAMA_2_7B, num_layers=given.layers),
            weights=given.weights,
            batches=given.batches,
            contexts=given.contexts,
            prefills=given.prefills,
            kv_dtype=given.kv_dtype,
            peer=not given.no_peer,
        )
        Run(plan, report, rates, device=device, recorder=CudaRecorder).measure()


if __name__ == "__main__":
    sys.exit(main())
