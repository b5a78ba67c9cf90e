"""The native kernels for tests, or a skip with the reason."""

from __future__ import annotations

import ctypes

import pytest

from llorch_worker.kernels.native.compiler import NativeUnavailable
from llorch_worker.kernels.native.library import native_library


def library_or_skip() -> ctypes.CDLL:
    try:
        return native_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
