from __future__ import annotations

import torch

from llorch_worker.weights import DenseLinear


def test_a_dense_layer_multiplies_by_its_transposed_weight() -> None:
    weight, x = torch.randn(5, 3), torch.randn(4, 3)
    linear = DenseLinear(weight)
    torch.testing.assert_close(linear(x), x @ weight.T)
    assert linear.weight_bytes == 60
