"""The real engine of an encoder, which waits for a file once it has computed some texts.

``GATE_AFTER`` of them, for the file ``GATE``; each text that it has computed is a line of
``GATE_LOG``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from llorch_worker.engine.any_engine import AnyEngine as Engine
from llorch_worker.model.encoder import Encoder, Pooling, Texts
from tests.waiting import wait_until

GATE, LOG = Path(os.environ["GATE"]), Path(os.environ["GATE_LOG"])
AFTER = int(os.environ["GATE_AFTER"])

_vectors = Encoder.vectors


def gated_vectors(self: Encoder, texts: Texts, pooling: Pooling) -> torch.Tensor:
    if not texts.token_ids.any():  # the warm-up
        return _vectors(self, texts, pooling)
    computed = LOG.read_text().count("\n") if LOG.exists() else 0
    if computed >= AFTER:
        wait_until(GATE.exists, timeout_s=600)
    vectors = _vectors(self, texts, pooling)
    with LOG.open("a") as log:
        log.write("text\n" * len(texts.lengths))
    return vectors


Encoder.vectors = gated_vectors  # type: ignore[method-assign]
__all__ = ["Engine"]
