from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine.memory import compute_device
from llorch_worker.engine.memory.compute_device import free_bytes, resolve_device, resolve_dtype
from llorch_worker.kernels import find_native_kernels
from tests.engine.conftest import LoadedModel

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As many CUDA devices as the test's parameter says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.parametrize(
    ("cards", "name", "device"),
    [
        (0, "auto", CPU),
        (0, "cpu", CPU),
        (2, "auto", CUDA),
        (2, "cpu", CPU),
        (2, "cuda", CUDA),
        (2, "cuda:1", torch.device("cuda", 1)),
    ],
    indirect=["cards"],
)
@pytest.mark.usefixtures("cards")
def test_a_device_that_is_there_is_taken(name: str, device: torch.device) -> None:
    assert resolve_device(name) == device


@pytest.mark.parametrize(
    ("cards", "name", "sentence"),
    [
        (0, "cuda", "use device cpu"),
        (0, "cuda:1", "use device cpu"),
        (2, "cuda:2", "device cuda:2 does not exist; the last card here is cuda:1"),
        (2, "cuda:-1", "unknown device 'cuda:-1'"),
        (0, "auto0", "unknown device 'auto0'"),
        (2, "auto:1", "unknown device 'auto:1'"),
        (0, "", "unknown device ''"),
    ],
    indirect=["cards"],
)
@pytest.mark.usefixtures("cards")
def test_a_device_that_is_not_there_is_refused_and_never_replaced(name: str, sentence: str) -> None:
    with pytest.raises(ModelLoadFailed, match=sentence):
        resolve_device(name)


def test_the_compute_dtype_is_exact_where_that_is_cheap_and_fast_elsewhere() -> None:
    fast = torch.bfloat16 if find_native_kernels() else torch.float32
    assert resolve_dtype("auto", CPU, parameters=1_000_000) is torch.float32
    assert resolve_dtype("auto", CPU, parameters=1_000_000_000) is fast
    assert resolve_dtype("auto", CPU, parameters=10**9, kernels="torch") is torch.float32
    assert resolve_dtype("auto", CUDA, parameters=1_000_000) is torch.bfloat16
    assert resolve_dtype("float16", CPU, parameters=1_000_000) is torch.float16
    with pytest.raises(ModelLoadFailed, match="unknown dtype 'fp32'; allowed: auto, float32"):
        resolve_dtype("fp32", CPU, parameters=1)


def test_a_tensor_on_another_device_is_named(loaded: LoadedModel) -> None:
    with loaded.engine() as engine:
        assert engine.misplaced_tensors() == ()
        rope = engine.cache.rope
        rope.cos = rope.cos.to("meta")
        assert engine.misplaced_tensors() == ("rope.cos on meta",)


def test_a_containers_limit_counts_as_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, around = (tmp_path / f"sys/fs/cgroup/{path}" for path in ("slice/service", "slice"))
    own.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/other\n0::/slice/service\n")
    for folder, limit in ((own, "5000"), (around, "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("2000\n")
    assert compute_device._cgroup_free_bytes(tmp_path) == 3_000
    # Cached files, the model's own among them, make room for whoever asks.
    (own / "memory.stat").write_text("anon 400\ninactive_file 900\nactive_file 100\n")
    assert compute_device._cgroup_free_bytes(tmp_path) == 4_000
    # A limit of a group around it holds as well.
    (around / "memory.max").write_text("2500\n")
    assert compute_device._cgroup_free_bytes(tmp_path) == 500
    (around / "memory.max").write_text("max\n")
    (own / "memory.max").write_text("max\n")
    assert compute_device._cgroup_free_bytes(tmp_path) is None
    assert compute_device._cgroup_free_bytes(tmp_path / "none") is None
    monkeypatch.setattr(compute_device, "_cgroup_free_bytes", lambda: 3_000)
    assert free_bytes(torch.device("cpu")) == 3_000


def test_a_limit_of_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    own = tmp_path / "sys/fs/cgroup/memory/box"
    own.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/box\n3:cpu:/\n0::/\n")
    (own / "memory.limit_in_bytes").write_text("5000\n")
    (own / "memory.usage_in_bytes").write_text("2000\n")
    (own / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 900\n")
    assert compute_device._cgroup_free_bytes(tmp_path) == 3_900


def test_what_torch_keeps_of_a_load_is_given_back_before_free_memory_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [600]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000 - sum(kept), 1_000))
    assert free_bytes(torch.device("cuda")) == 1_000
