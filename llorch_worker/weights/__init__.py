"""Files to tensors: GGUF and Hugging Face checkpoints behind one interface, and linear layers."""

from llorch_worker.weights.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from llorch_worker.weights.linear import DenseLinear, Linear
from llorch_worker.weights.linears import DenseLinears, Linears, select_linears
from llorch_worker.weights.packed_weight import PackedWeight, Part

__all__ = [
    "Checkpoint",
    "DenseLinear",
    "DenseLinears",
    "Linear",
    "Linears",
    "PackedWeight",
    "Part",
    "TensorInfo",
    "open_checkpoint",
    "select_linears",
]
