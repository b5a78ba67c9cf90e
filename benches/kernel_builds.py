"""Builds of the native kernels by turns: the products of a model's layers.

``python -m benches.kernel_builds MODEL.gguf BEFORE.so AFTER.so --variant avx2 [--rows 1,8,16]
[--threads 2]``.
``python -m llorch_worker.kernels.native avx2`` prints the build of a working tree. The builds must
have one interface. Layers take turns, so that weights come from memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benches.arguments import existing_path, known_errors, whole_number, whole_numbers
from benches.by_turns import compare
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.kernels.native.library import NativeUnavailable, native_kernels
from llorch_worker.kernels.native.variants import VARIANTS
from llorch_worker.model import resolve_config
from llorch_worker.model.weight_table import layer_weights
from llorch_worker.settings import Variant
from llorch_worker.weights import Linear, open_checkpoint
from llorch_worker.weights.native_linear import NativeLinears


def layers_of(model: Path, variant: Variant, build: Path) -> list[tuple[Linear, int]]:
    """All matrices of the layers, and their columns."""
    checkpoint = open_checkpoint(model)
    config = resolve_config(checkpoint)
    linears = NativeLinears(native_kernels(variant, build))
    return [
        (linears.load(checkpoint, matrix), matrix.shape[1])
        for number in range(config.num_layers)
        for matrix in layer_weights(config, number).matrices
    ]


def products(layers: list[tuple[Linear, int]], rows: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    activations = {
        columns: torch.randn(rows, columns, generator=generator).bfloat16() for _, columns in layers
    }

    def step() -> None:
        for linear, columns in layers:
            linear(activations[columns])

    return step


def main(
    model: Path, builds: list[Path], variant: Variant, all_rows: tuple[int, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    try:
        layers = {
            f"{number}. {build}": layers_of(model, variant, build)
            for number, build in enumerate(builds, 1)
        }
    except NativeUnavailable as reason:
        raise usage_error(str(reason)) from None
    for rows in all_rows:
        steps = {build: products(matrices, rows) for build, matrices in layers.items()}
        compare(f"{variant}, {rows} rows", steps, threads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benches.kernel_builds")
    parser.add_argument("model", type=existing_path)
    parser.add_argument("builds", nargs="+", type=existing_path, metavar="BUILD.so")
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--rows", type=whole_numbers, default="1,8,16,32,128")
    parser.add_argument("--threads", type=whole_number, default=1)
    given = parser.parse_args()
    with known_errors():
        main(given.model, given.builds, given.variant, given.rows, given.threads)
