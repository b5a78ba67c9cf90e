"""The compiled kernels, loaded once a process."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from llorch_worker.kernels.native.compiler import NativeUnavailable, shared_object
from llorch_worker.kernels.openmp import torch_openmp

Pointer = ctypes.c_void_p
"""A tensor's ``data_ptr()``."""
Long = ctypes.c_int64
Int = ctypes.c_int
Float = ctypes.c_float


class NativeLibrary:
    """Functions of the shared object. Calls release the GIL.

    Their OpenMP is torch's own: a second library would bring a second pool of threads, and each
    pool's waiting threads would spin where the other's work.
    """

    def __init__(self) -> None:
        openmp = torch_openmp()
        if openmp is not None:
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(shared_object(link_openmp=openmp is None)))

    def function(
        self, name: str, *arguments: type, result: type | None = None
    ) -> Callable[..., Any]:
        """``name`` with the C types of its ``arguments``."""
        found = self._library[name]
        found.argtypes = arguments
        found.restype = result
        return found


def native_library() -> NativeLibrary:
    """The library, compiled where this machine has not yet done so.

    Raises:
        NativeUnavailable: with the reason; the same one at every call.
    """
    outcome = _load()
    if isinstance(outcome, NativeUnavailable):
        raise outcome
    return outcome


@functools.cache
def _load() -> NativeLibrary | NativeUnavailable:
    try:
        return NativeLibrary()
    except NativeUnavailable as reason:
        return reason
    except OSError as error:  # the dynamic linker's
        return NativeUnavailable(f"the compiled kernels do not load: {error}")
