"""The rates of this processor: multiply-adds in registers, and reading memory."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from benches.cpu_limits.figures import Product, ProductRate, Rate
from llorch_worker.bench.instruments.percentiles import spread_of
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.kernels.arena import Arena
from llorch_worker.kernels.native import variants as native
from llorch_worker.settings import Variant

SOURCE = Path(__file__).with_name("rates.c")
ROUNDS = 5_000_000
"""Some 20 ms: on a shared machine a short pass is more often undisturbed."""
READ_BYTES = 2**30
"""Far larger than any cache."""
READ_MULTIPLE_BYTES = 1024

INSTRUCTIONS: dict[Variant, tuple[str, str, str, str]] = {
    "avx512bf16": ("vfmadd231ps", "vdpbf16ps", "vpdpbusd", "vpdpbusd"),
    "avx512vnni": ("vfmadd231ps", "vfmadd231ps", "vpdpbusd", "vpdpbusd"),
    "avx512": ("vfmadd231ps", "vfmadd231ps", "vpmaddubsw", "vpmaddwd"),
    "avxvnni": ("vfmadd231ps", "vfmadd231ps", "vpdpbusd", "vpdpbusd"),
    "avx2": ("vfmadd231ps", "vfmadd231ps", "vpmaddubsw", "vpmaddwd"),
    "neonbf16": ("fmla", "bfdot", "usdot", "usdot"),
    "neon": ("fmla", "fmla", "sdot", "sdot"),
}
"""What a variant multiplies float32, bf16, nibbles and bytes with. AMX is missing: no loop measures
its tiles."""


def instruction_of(variant: Variant, product: Product) -> str:
    return INSTRUCTIONS[variant][get_args(Product).index(product.removeprefix("scaled_"))]


def runnable_variants() -> list[Variant]:
    """The variants whose instructions this processor has, the fastest first."""
    variants = native.variants_of(platform.machine())
    return [variant for variant in variants if not native.missing_flags(variant)]


def measure_rates(threads: int, passes: int) -> tuple[list[ProductRate], Rate]:
    """The rates of all products, and of reading 1 GiB of memory, in ``threads`` threads.

    Raises:
        CommandError: there is no C compiler, or no variant for this processor.
    """
    variants = [variant for variant in runnable_variants() if variant in INSTRUCTIONS]
    if not variants:
        raise CommandError("NOT_MEASURED", "no variant of the kernels runs on this processor")
    with TemporaryDirectory(prefix="llorch-bench-") as folder:
        compiled = {
            variant: ctypes.CDLL(str(_compiled(variant, Path(folder)))) for variant in variants
        }
    products = {
        (variant, product): [partial(_function(library, variant, product), ROUNDS)] * threads
        for variant, library in compiled.items()
        for product in get_args(Product)
    }
    weights = Arena().zeros(READ_BYTES, dtype=torch.uint8).fill_(1)
    read = _function(compiled[variants[0]], variants[0], "memory")
    part = READ_BYTES // threads // READ_MULTIPLE_BYTES * READ_MULTIPLE_BYTES
    reads = [partial(read, weights.data_ptr() + n * part, part) for n in range(threads)]
    works = [*products.values(), reads]
    taken: list[list[float]] = [[] for _ in works]
    with ThreadPoolExecutor(threads) as pool:
        # In turns: what disturbs a while disturbs one pass of each.
        for _ in range(passes):
            for per_s, work in zip(taken, works, strict=True):
                per_s.append(_per_s(pool, work))
    best = max(3, passes // 10)
    *rates, read_bytes = (
        Rate(per_s=max(each), spread=spread_of(sorted(each)[-best:])) for each in taken
    )
    return [
        ProductRate(
            variant=variant,
            product=product,
            instruction=instruction_of(variant, product),
            rate=rate,
        )
        for (variant, product), rate in zip(products, rates, strict=True)
    ], read_bytes


def _per_s(pool: Executor, work: Sequence[Callable[[], int]]) -> float:
    """What all calls together do per second, each in a thread of its own."""
    began_s = time.perf_counter()
    done: int = sum(pool.map(lambda call: call(), work))
    return done / (time.perf_counter() - began_s)


def _compiled(variant: Variant, folder: Path) -> Path:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise CommandError(
            "NOT_MEASURED", f"needs a C compiler: no {compiler} on the PATH; install gcc, or set CC"
        )
    library = folder / f"{variant}.so"
    subprocess.run([compiler, "-shared", *compiler_arguments(variant, library)], check=True)
    return library


def compiler_arguments(variant: Variant, out: Path) -> list[str]:
    """What makes GCC compile rates.c for a variant."""
    includes = f"-I{Path(native.__file__).parent}"
    flags = ("-O3", "-std=gnu11", "-fPIC", *native.compiler_flags(variant), includes)
    return [*flags, str(SOURCE), "-o", str(out)]


def _function(library: ctypes.CDLL, variant: Variant, name: str) -> Any:
    function = library[f"llorch_{variant}_{name}"]
    function.argtypes = [ctypes.c_void_p, ctypes.c_long] if name == "memory" else [ctypes.c_long]
    function.restype = ctypes.c_long
    return function
