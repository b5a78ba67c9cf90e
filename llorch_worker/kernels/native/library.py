"""The compiled kernels of one variant, loaded once per process."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from llorch_worker.engine_options import Variant
from llorch_worker.kernels.native.build import CannotBuild, built
from llorch_worker.kernels.native.tile_permission import tile_refusal
from llorch_worker.kernels.native.variants import VARIANTS, missing_flags, variants_of
from llorch_worker.kernels.openmp import torch_openmp

logger = logging.getLogger(__name__)

SYSTEM_OPENMP = "libgomp.so.1"

_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,  # a tensor's data_ptr()
    "L": ctypes.c_int64,
    "I": ctypes.c_int,
    "F": ctypes.c_float,
}
_SIGNATURES = {
    "rms_norm": "PPPLLFI",
    "add_rms_norm": "PPPPLLFI",
    "silu_and_mul": "PPLLI",
    "gelu_and_mul": "PPLLI",
    "rope_and_write": "PPPPPPPPILLLLI",
    "paged_attention_partials": "PL>L",
    "paged_attention": "PPPPPIPPPPLLLLLLFLFI>I",
    "pack_codes": "PPLLII",
    "pack_scales": "PPLL",
    "pack_levels": "PPLL",
    "pack_blocks": "PPPPLLLII>I",
    "quantised_work_bytes": "LLILI>L",
    "quantised_linear": "PPPLIPLI",
    "pack_bf16": "PPLLI",
    "bf16_linear": "PPPLILI",
    "run_layers": "PPI>I",
    "truncate_rows": "PPPPPPPLLI",
    "truncate_rows_work_bytes": "LI>L",
}
"""Argument types, and after ``>`` the type of the result."""


class NativeUnavailable(Exception):
    """The native kernels cannot be used here; the message says why."""


class NativeKernels(SimpleNamespace):
    """A variant's functions under the names of ``_SIGNATURES``. Calls release the GIL."""

    variant: Variant


def native_kernels(
    wanted: Variant | Literal["auto"] = "auto", build: Path | None = None
) -> NativeKernels:
    """The kernels of a variant, or of the fastest one that this processor runs.

    The first process that asks for them compiles them. ``build``: a library to take in their place.

    Raises:
        NativeUnavailable: the processor lacks instructions, Linux refuses their registers, or they
            cannot be compiled or loaded.
    """
    loaded: NativeKernels | str = ""
    for variant in _runnable(wanted):
        # An older compiler may know none of the newest instructions.
        loaded = _load(variant, build)
        if isinstance(loaded, NativeKernels):
            return loaded
        if wanted == "auto":
            _warn(loaded)
    raise NativeUnavailable(loaded)


def _runnable(wanted: Variant | Literal["auto"]) -> list[Variant]:
    """The variants among those wanted that this process can run, at least one."""
    if wanted != "auto":
        refusal = _refusal(wanted)
        if refusal is not None:
            raise NativeUnavailable(refusal)
        return [wanted]
    variants = variants_of(platform.machine())
    refusals = {variant: _refusal(variant) for variant in variants}
    runnable = [variant for variant, refusal in refusals.items() if refusal is None]
    for variant, refusal in refusals.items():
        if refusal is not None and not missing_flags(variant):
            _warn(refusal)
    if not runnable:
        lacks = ", ".join(missing_flags(variants[-1])) if variants else "both"
        raise NativeUnavailable(
            "the kernels need Linux on x86-64 with AVX2, or on AArch64 with dot products; "
            f"this machine lacks {lacks}"
        )
    return runnable


def _refusal(variant: Variant) -> str | None:
    """The reason why this process cannot run a variant, or None."""
    missing = missing_flags(variant)
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    return tile_refusal() if "amx_tile" in VARIANTS[variant] else None


@functools.cache
def _load(variant: Variant, build: Path | None) -> NativeKernels | str:
    """The kernels, or the reason why there are none."""
    try:
        file = build or built(variant)
    except CannotBuild as reason:
        return str(reason)
    try:
        # The kernels use torch's OpenMP library: its symbols are looked up when they are loaded. A
        # second library would have its own pool of threads, and the waiting threads of each pool
        # would spin while the other one works.
        ctypes.CDLL(str(torch_openmp() or SYSTEM_OPENMP), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(file.absolute()))  # a name without a folder would be searched for
    except OSError as error:  # from the dynamic linker
        return f"the compiled kernels cannot be loaded: {error}; remove {file}"
    kernels = NativeKernels(variant=variant)
    for name, signature in _SIGNATURES.items():
        arguments, _, result = signature.partition(">")
        try:
            function = library[f"llorch_{variant}_{name}"]
        except AttributeError:
            return f"{file} has no {name} for {variant}"
        function.argtypes = [_TYPES[code] for code in arguments]
        function.restype = _TYPES[result] if result else None
        setattr(kernels, name, function)
    return kernels


@functools.cache  # a reason may hold for several variants
def _warn(reason: str) -> None:
    logger.warning("slower kernels are used: %s", reason)
