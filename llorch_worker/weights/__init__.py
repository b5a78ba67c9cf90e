"""Files to tensors: GGUF and Hugging Face checkpoints behind one interface, and linear layers."""

from llorch_worker.weights.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from llorch_worker.weights.linear import DenseLinear, Linear

__all__ = ["Checkpoint", "DenseLinear", "Linear", "TensorInfo", "open_checkpoint"]
