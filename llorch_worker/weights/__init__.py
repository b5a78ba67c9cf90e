"""Files to tensors: GGUF and Hugging Face checkpoints behind one interface, and linear layers."""

from llorch_worker.weights.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from llorch_worker.weights.fused_weight import FusedWeight, Part
from llorch_worker.weights.linear import DenseLinear, Linear
from llorch_worker.weights.linears import DenseLinears, Linears, select_linears

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
