"""Which cards torch sees."""

from __future__ import annotations

import torch


def visible_cards(device: torch.device) -> tuple[str, ...]:
    """The UUIDs of the cards that torch sees beside ``device``; empty unless that is a card."""
    if device.type != "cuda":
        return ()
    count = torch.cuda.device_count()
    return tuple(str(torch.cuda.get_device_properties(n).uuid) for n in range(count))
