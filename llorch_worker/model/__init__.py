"""The model itself: a ragged forward pass over a cache that is passed in."""

from llorch_worker.model.batch import ForwardModel, RaggedBatch
from llorch_worker.model.config import ModelConfig
from llorch_worker.model.forward_pass import ForwardPass
from llorch_worker.model.resolve import resolve_config
from llorch_worker.model.transformer import Transformer
from llorch_worker.model.weight_table import model_bytes, parameter_count, quantised_types

__all__ = [
    "ForwardModel",
    "ForwardPass",
    "ModelConfig",
    "RaggedBatch",
    "Transformer",
    "model_bytes",
    "parameter_count",
    "quantised_types",
    "resolve_config",
]
