"""Which cards a process may take."""

from __future__ import annotations

import pytest

from llorch_worker import devices
from llorch_worker.devices import Card, DeviceUnavailable, default_sequences, visible_cards
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


@pytest.mark.parametrize("has_card", [False, True])
def test_a_worker_on_a_card_takes_more_sequences_by_default(
    has_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "list_cards", lambda: CARDS if has_card else ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert default_sequences("cpu") == 16
    assert default_sequences("server") == 16
    assert default_sequences("cuda") == default_sequences("cuda:3") == 256
    assert default_sequences("auto") == (256 if has_card else 16)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: False)
    assert default_sequences("auto") == 16
