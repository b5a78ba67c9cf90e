"""Small numbers of the host that a device needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


def on_device(
    values: Sequence[Any] | npt.NDArray[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``values`` as a tensor; the host does not wait for earlier steps, thanks to pinned memory."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)
