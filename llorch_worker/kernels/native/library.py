"""The compiled kernels, loaded once per process."""

from __future__ import annotations

import ctypes
import functools

from llorch_worker.kernels.native.compiler import NativeUnavailable, shared_object
from llorch_worker.kernels.openmp import torch_openmp

_TYPES = {
    "P": ctypes.c_void_p,  # a tensor's data_ptr()
    "L": ctypes.c_int64,
    "I": ctypes.c_int,
    "F": ctypes.c_float,
}
_SIGNATURES = {
    "llorch_rms_norm": "PPPLLFI",
    "llorch_add_rms_norm": "PPPPLLFI",
    "llorch_silu_and_mul": "PPLLI",
    "llorch_rope_and_write": "PPPPPPLLLLI",
    "llorch_paged_attention_partials": "PL>L",
    "llorch_paged_attention": "PPPPPPPLLLLLLI>I",
    "llorch_pack_codes": "PPLLII",
    "llorch_pack_scales": "PPLLF",
    "llorch_pack_blocks": "PPPPLLLI>I",
    "llorch_quantised_work_bytes": "LLIL>L",
    "llorch_quantised_linear": "PPPPPLIPLLLIIIFI",
    "llorch_pack_bf16": "PPLLI",
    "llorch_bf16_linear": "PPPLILLLI",
    "llorch_truncate_rows": "PPPPPPPLLI",
    "llorch_truncate_rows_work_bytes": "LI>L",
}
"""Argument types, and after ``>`` the type of the result."""


def native_library() -> ctypes.CDLL:
    """The library, compiled unless this machine already has it. Its calls release the GIL.

    Raises:
        NativeUnavailable: with the reason; every call raises the same one.
    """
    outcome = _load()
    if isinstance(outcome, NativeUnavailable):
        raise outcome
    return outcome


@functools.cache
def _load() -> ctypes.CDLL | NativeUnavailable:
    try:
        # The kernels use torch's OpenMP library. A second one would have its own pool of threads,
        # and the waiting threads of each pool would spin while the other one works.
        openmp = torch_openmp()
        if openmp is not None:
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(shared_object(link_openmp=openmp is None)))
    except NativeUnavailable as reason:
        return reason
    except OSError as error:  # from the dynamic linker
        return NativeUnavailable(f"the compiled kernels cannot be loaded: {error}")
    for name, signature in _SIGNATURES.items():
        arguments, _, result = signature.partition(">")
        function = getattr(library, name.replace("llorch_", "llorch_native_"))
        setattr(library, name, function)
        function.argtypes = [_TYPES[code] for code in arguments]
        function.restype = _TYPES[result] if result else None
    return library
