"""Which cards a process may take."""

from __future__ import annotations

import pytest

from llorch_worker.devices import Card, DeviceUnavailable, visible_cards
from tests.fake_gpu.machine import uuid

CARDS = tuple(Card(i, uuid(i), "NVIDIA H200", 1, 2) for i in range(4))


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        (uuid(2), [2]),
        (f"{uuid(2)[:9]},0", [2, 0]),
        ("1,7,2", [1]),
        ("-1,1", []),
        ("1,1,2", [1]),
        ("GPU-,1", []),
    ],
)
def test_cuda_visible_devices_selects_cards_as_in_cuda(
    visible: str | None, indices: list[int]
) -> None:
    assert [card.index for card in visible_cards(CARDS, visible)] == indices


def test_a_part_of_a_card_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="MIG"):
        visible_cards(CARDS, "MIG-1234")
