"""The model's operations, as fast as the device allows, each with a plain torch twin.

Kernels see tensors only: this package imports nothing from the model, the cache or the weights.
"""

from llorch_worker.kernels.arena import Arena
from llorch_worker.kernels.interface import (
    PLAIN,
    AttentionForm,
    AttentionRoom,
    CausalMask,
    FusedSample,
    Ops,
    PagedAttention,
    PagedSequences,
    SampledRows,
    TruncateRows,
)
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.openmp import cpu_threads, end_own_threads
from llorch_worker.kernels.select import (
    ChosenOps,
    choose_ops,
    find_native_kernels,
    native_absence,
    select_sample,
    select_truncate_rows,
)
from llorch_worker.kernels.torch_ops import TorchOps

__all__ = [
    "PLAIN",
    "Arena",
    "AttentionForm",
    "AttentionRoom",
    "CausalMask",
    "ChosenOps",
    "FusedSample",
    "LayerKV",
    "Ops",
    "PagedAttention",
    "PagedSequences",
    "SampledRows",
    "TorchOps",
    "TruncateRows",
    "choose_ops",
    "cpu_threads",
    "end_own_threads",
    "find_native_kernels",
    "native_absence",
    "select_sample",
    "select_truncate_rows",
]
