from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llorch_worker.engine.memory import placement
from llorch_worker.engine.memory.placement import free_bytes


def test_a_containers_limit_counts_as_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert placement._cgroup_free_bytes(tmp_path) == 3_000
    # Cached files, the model's own among them, make room for whoever asks.
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 900\nactive_file 100\n")
    assert placement._cgroup_free_bytes(tmp_path) == 4_000
    (tmp_path / "memory.max").write_text("max\n")
    assert placement._cgroup_free_bytes(tmp_path) is None
    assert placement._cgroup_free_bytes(tmp_path / "none") is None
    monkeypatch.setattr(placement, "_cgroup_free_bytes", lambda: 3_000)
    assert free_bytes(torch.device("cpu")) == 3_000


def test_what_torch_keeps_of_a_load_is_given_back_before_free_memory_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [600]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000 - sum(kept), 1_000))
    assert free_bytes(torch.device("cuda")) == 1_000
