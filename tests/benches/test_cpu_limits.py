"""``python -m benches.cpu_limits``: a processor's limits, and what follows for a model."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from benches.cpu_limits.bounds import Matrices
from benches.cpu_limits.figures import Bound, ModelBounds, Product, ProductRate, Rate
from benches.cpu_limits.rates import (
    INSTRUCTIONS,
    compiler_arguments,
    instruction_of,
    runnable_variants,
)
from llorch_worker.kernels.native.variants import variants_of
from llorch_worker.settings import Variant
from tests.benches.program import run_program
from tests.cli.test_bad_input import sentence
from tests.kernels.native import native_or_skip
from tests.tools.test_make_model import make

COMPILERS = {"x86_64": ("x86_64-linux-gnu-gcc", "cc"), "aarch64": ("aarch64-linux-gnu-gcc", "cc")}

LAYERS = 2 * (256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 256 * 512)
"""Numbers in the matrices of the tiny shape's two layers: attention's four and the MLP's three."""
OUTPUT = 512 * 256


def test_every_variant_of_the_processor_gets_its_limits(demo_model: Path) -> None:
    runnable = runnable_variants()
    ran = run_program(
        "benches.cpu_limits",
        "--model",
        str(demo_model),
        "--threads",
        "1",
        "--passes",
        "1",
        "--json",
    )
    assert (ran.code, ran.err) == (0, ""), ran
    found = ran.json
    variants = [variant for variant in runnable if variant in INSTRUCTIONS]
    assert found["not_measured"] == [variant for variant in runnable if variant == "amx"]
    assert [(each["variant"], each["product"]) for each in found["products"]] == [
        (variant, product) for variant in variants for product in get_args(Product)
    ]
    for rate in (*(each["rate"] for each in found["products"]), found["read_bytes"]):
        assert rate["per_s"] > 0
    (model,) = found["models"]
    steps = ("prefill 512", "decode x1", "decode x8", "decode x16", "decode x32")
    assert [(each["variant"], each["step"]) for each in model["bounds"]] == [
        (variant, step) for variant in variants for step in steps
    ]


def test_the_tables_have_a_line_for_each_variant(demo_model: Path) -> None:
    variants = [variant for variant in runnable_variants() if variant in INSTRUCTIONS]
    ran = run_program("benches.cpu_limits", "--model", str(demo_model), "--passes", "1")
    for variant in variants:
        lines = [line for line in ran.out.splitlines() if line.startswith(f"{variant} ")]
        assert len(lines) == len(get_args(Product)) + 1
    assert re.search(r"^Memory, read in order: [\d.]+ GB$", ran.out, re.MULTILINE)


def bounds_of(tmp_path: Path, *options: str, read_bytes_per_s: float = 1e18) -> ModelBounds:
    """Those of the tiny shape, on a processor with a rate of its own for each product."""
    native_or_skip()
    path = tmp_path / "tiny.gguf"
    assert make("--shape", "tiny", *options, "--out", path).returncode == 0
    rates = {"float32": 1e9, "bf16": 2e9, "scaled_nibbles": 4e9, "scaled_bytes": 8e9}
    products = [
        ProductRate(
            variant="avx2", product=product, instruction="", rate=Rate(per_s=rate, spread=None)
        )
        for product, rate in rates.items()
    ]
    return Matrices.of(path).bounds(products, Rate(per_s=read_bytes_per_s, spread=None))


def by_step(found: ModelBounds) -> dict[str, Bound]:
    return {bound.step: bound for bound in found.bounds}


def test_products_and_bytes_are_those_counted_by_hand(tmp_path: Path) -> None:
    found = bounds_of(tmp_path, "--type", "bf16", read_bytes_per_s=1e9)
    assert (found.layer_multiply_adds, found.output_multiply_adds) == (LAYERS, OUTPUT)
    assert found.weight_bytes == 2 * (LAYERS + OUTPUT)
    bounds = by_step(found)
    # One sequence waits for the weights, 32 for the products.
    assert bounds["decode x1"].limit == "memory"
    assert bounds["decode x1"].tokens_per_s == pytest.approx(1e9 / (2 * (LAYERS + OUTPUT)))
    assert bounds["decode x32"].limit == "arithmetic"
    assert bounds["decode x32"].tokens_per_s == pytest.approx(2e9 / (LAYERS + OUTPUT))


def test_a_prompt_needs_the_output_matrix_once_and_each_type_its_own_product(
    tmp_path: Path,
) -> None:
    bounds = by_step(bounds_of(tmp_path, "--type", "q4_0", "--output-type", "q6_k"))
    prefill_s = 512 * LAYERS / 4e9 + OUTPUT / 8e9
    assert bounds["prefill 512"].tokens_per_s == pytest.approx(512 / prefill_s)
    decode_s = LAYERS / 4e9 + OUTPUT / 8e9
    assert bounds["decode x8"].tokens_per_s == pytest.approx(1 / decode_s)


@pytest.mark.parametrize("variant", INSTRUCTIONS)
def test_the_loops_multiply_with_the_instruction_that_the_table_names(
    tmp_path: Path, variant: Variant
) -> None:
    (machine,) = (each for each in COMPILERS if variant in variants_of(each))
    compiler = next(filter(shutil.which, COMPILERS[machine]), None)
    asked = [compiler or "true", "-dumpmachine"]
    target = subprocess.run(asked, capture_output=True, text=True, check=False)
    if compiler is None or not target.stdout.startswith(machine):
        pytest.skip(f"needs a C compiler for {machine}")
    out = tmp_path / "rates.s"
    # Equal functions would become one.
    options = ("-S", "-fno-ipa-icf", *compiler_arguments(variant, out))
    subprocess.run([compiler, *options], check=True)
    for product in get_args(Product):
        instruction = instruction_of(variant, product)
        _, _, rest = out.read_text().partition(f"\nllorch_{variant}_{product}:\n")
        body, _, _ = rest.partition(".cfi_endproc")
        # As many as hide a latency; a loop that the compiler saw through has fewer, or none.
        assert len(re.findall(rf"\b{instruction}\t", body)) >= 12, product


def test_a_model_that_is_missing_is_named() -> None:
    ran = run_program("benches.cpu_limits", "--model", "/nowhere/model.gguf", "--passes", "9999999")
    assert sentence(ran, 1).startswith("/nowhere/model.gguf does not exist;")


def test_a_missing_compiler_is_named() -> None:
    native_or_skip()
    said = sentence(run_program("benches.cpu_limits", CC="no-such-compiler"), 1)
    assert said == "needs a C compiler: no no-such-compiler on the PATH; install gcc, or set CC"
