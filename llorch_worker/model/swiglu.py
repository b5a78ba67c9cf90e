"""The feed-forward part of a block: SwiGLU (arXiv 2002.05202)."""

from __future__ import annotations

import torch

from llorch_worker.kernels import Ops
from llorch_worker.weights import Linear


class SwiGlu:
    """``down(silu(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops) -> None:
        """``gate_up``: hidden to 2 * intermediate, gate rows first; ``down``: back to hidden."""
        self.gate_up = gate_up
        self.down = down
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x: [tokens, hidden]`` gives the same shape."""
        return self.down(self._ops.silu_and_mul(self.gate_up(x)))
