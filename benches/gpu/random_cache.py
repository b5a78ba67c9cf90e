"""Random keys and values. Zeros would cost the card less power than a worker's real data."""

from __future__ import annotations

import torch

from llorch_worker.cache import PagedKV
from llorch_worker.kernels.layer_kv import INT8_LARGEST


def draw_keys_and_values(kv: PagedKV) -> None:
    """Fills the whole cache, of any dtype; needs at most the memory of one layer."""
    for layer in kv.layers:
        for stored, scales in (
            (layer.keys, layer.key_scales),
            (layer.values, layer.value_scales),
        ):
            if scales is not None:
                stored.random_(-int(INT8_LARGEST), int(INT8_LARGEST) + 1)
                scales.fill_(2 / INT8_LARGEST)
            elif stored.dtype.itemsize == 1:
                stored.copy_(torch.randn(stored.shape, dtype=kv.dtype, device=stored.device))
            else:
                stored.normal_()
