"""The instruction sets that the kernels are compiled for, and which of them the processor has.

The build reads this file alone, so it imports nothing from the package.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llorch_worker.settings import Variant

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")

VARIANTS: dict[Variant, tuple[str, ...]] = {
    "avx512bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
}
"""The fastest first, with the processor's flags that each needs, as Linux names them."""


def compiler_flags(variant: Variant) -> list[str]:
    """What makes GCC use a variant's instructions, and name its functions."""
    return [f"-m{flag.replace('_', '')}" for flag in VARIANTS[variant]] + [f"-DVARIANT={variant}"]


def missing_flags(variant: Variant) -> list[str]:
    """What the variant needs and this processor lacks."""
    flags = _processor_flags()
    return [flag for flag in VARIANTS[variant] if flag not in flags]


def _processor_flags() -> set[str]:
    """Those of /proc/cpuinfo; none on another system or another architecture."""
    if platform.system() != "Linux":
        return set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()
