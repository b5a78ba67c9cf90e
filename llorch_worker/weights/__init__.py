"""Files to tensors: GGUF and Hugging Face checkpoints behind one interface, and linear layers."""

from llorch_worker.weights.checkpoint import Checkpoint, TensorInfo
from llorch_worker.weights.fused_weight import FusedWeight, Part
from llorch_worker.weights.linear import DenseLinear, DenseLinears, Linear, Linears
from llorch_worker.weights.open_checkpoint import open_checkpoint
from llorch_worker.weights.select_linears import select_linears

__all__ = [
    "Checkpoint",
    "DenseLinear",
    "DenseLinears",
    "FusedWeight",
    "Linear",
    "Linears",
    "Part",
    "TensorInfo",
    "open_checkpoint",
    "select_linears",
]
