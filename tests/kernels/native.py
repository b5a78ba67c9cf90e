"""The native kernels for tests, or a skip with the reason."""

from __future__ import annotations

import platform
from typing import Any, Literal

import pytest

from llorch_worker.engine_options import Variant
from llorch_worker.kernels.native.library import NativeKernels, NativeUnavailable, native_kernels
from llorch_worker.kernels.native.variants import missing_flags, variants_of

VARIANTS = variants_of(platform.machine())


def variant_params() -> list[Any]:
    """The variants as parameters. All tests of one that the processor lacks count as one skip."""

    def param(variant: Variant) -> Any:
        missing = missing_flags(variant)
        reason = f"needs a processor with {', '.join(missing)}"
        return pytest.param(variant, marks=pytest.mark.lacks(reason, when=bool(missing)))

    return [param(variant) for variant in VARIANTS]


def native_or_skip(variant: Variant | Literal["auto"] = "auto") -> NativeKernels:
    try:
        return native_kernels(variant)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def runnable_variants() -> list[Variant]:
    """Those that this machine can run, or a skip if there is none."""
    native_or_skip()
    runnable = []
    for variant in VARIANTS:
        try:
            native_kernels(variant)
        except NativeUnavailable:
            continue
        runnable.append(variant)
    return runnable
