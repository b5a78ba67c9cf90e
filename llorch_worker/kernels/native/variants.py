"""The instruction sets that the kernels are compiled for, and which of them the processor has."""

from __future__ import annotations

import platform
from pathlib import Path

from llorch_worker.engine_options import Variant

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")

_NEON = ("asimd", "asimddp")

_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")

VARIANTS: dict[Variant, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16, "amx_tile", "amx_int8", "amx_bf16"),
    "avx512bf16": _AVX512_BF16,
    "avx512vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
    "neonbf16": (*_NEON, "i8mm", "bf16"),
    "neon": _NEON,
}
"""The fastest first, with the processor's flags that each needs, as Linux names them."""

_MARCH: dict[Variant, str] = {
    "neonbf16": "armv8.2-a+dotprod+i8mm+bf16",
    "neon": "armv8.2-a+dotprod",
}
"""GCC's name for what a variant needs of AArch64; every processor with dot products has v8.2."""


def variants_of(machine: str) -> list[Variant]:
    """The variants of an architecture, as ``uname -m`` names it; the last needs the least."""
    if machine == "x86_64":
        return [variant for variant in VARIANTS if variant not in _MARCH]
    return list(_MARCH) if machine == "aarch64" else []


def is_measured(variant: Variant) -> bool:
    """Whether its speed is known: the kernels for AArch64 have only run under an emulator."""
    return variant not in _MARCH


def compiler_flags(variant: Variant) -> list[str]:
    """What makes GCC use a variant's instructions, and name its functions."""
    if variant in _MARCH:
        instructions = [f"-march={_MARCH[variant]}"]
    else:
        instructions = [f"-m{_option(flag)}" for flag in VARIANTS[variant]]
    return [*instructions, f"-DVARIANT={variant}"]


def _option(flag: str) -> str:
    """GCC's name for one of Linux': avx512vnni for avx512_vnni, but amx-int8 for amx_int8."""
    return flag.replace("_", "-" if flag.startswith("amx") else "")


def missing_flags(variant: Variant) -> list[str]:
    """What the variant needs and this processor lacks."""
    flags = _processor_flags()
    return [flag for flag in VARIANTS[variant] if flag not in flags]


def _processor_flags() -> set[str]:
    """Those of /proc/cpuinfo, which on AArch64 are the names of HWCAP; none on another system."""
    if platform.system() != "Linux":
        return set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
