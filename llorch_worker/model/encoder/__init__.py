"""Encoders: one pass over whole texts, and the vector or the score that comes of each."""

from llorch_worker.model.encoder.config import EncoderConfig, resolve_encoder
from llorch_worker.model.encoder.encoder import Encoder, Texts
from llorch_worker.model.encoder.pooling import Pooling, PoolingKind

__all__ = ["Encoder", "EncoderConfig", "Pooling", "PoolingKind", "Texts", "resolve_encoder"]
