"""Files to tensors: GGUF and Hugging Face checkpoints behind one interface, linear layers,
embeddings."""

from llorch_worker.weights.checkpoint import Checkpoint, TensorInfo
from llorch_worker.weights.embedding import (
    DenseEmbedding,
    Embedding,
    embedding_bytes,
    load_embedding,
)
from llorch_worker.weights.fingerprint import fingerprint
from llorch_worker.weights.fused_weight import FusedWeight, Part
from llorch_worker.weights.linear import DenseLinear, DenseLinears, Linear, Linears
from llorch_worker.weights.open_checkpoint import open_checkpoint
from llorch_worker.weights.rope_order import RopeOrder
from llorch_worker.weights.select_linears import select_linears

__all__ = [
    "Checkpoint",
    "DenseEmbedding",
    "DenseLinear",
    "DenseLinears",
    "Embedding",
    "FusedWeight",
    "Linear",
    "Linears",
    "Part",
    "RopeOrder",
    "TensorInfo",
    "embedding_bytes",
    "fingerprint",
    "load_embedding",
    "open_checkpoint",
    "select_linears",
]
