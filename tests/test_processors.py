"""Which processors a process may use, on machines that are trees of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llorch_worker import processors


def machine(root: Path, cores: list[tuple[int, list[int]]]) -> None:
    """Writes ``sys`` for cores, each with its socket and its hyper-threads."""
    for socket, threads in cores:
        for number in threads:
            topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{socket}\n")
            (topology / "thread_siblings_list").write_text(",".join(map(str, threads)) + "\n")


TWO_SOCKETS = [(0, [0, 4]), (0, [1, 5]), (1, [2, 6]), (1, [3, 7])]
"""Linux numbers the second hyper-threads after all cores."""


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    allowed = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    return allowed


def group(root: Path, text: str, files: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)
    for name, value in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value)


@pytest.mark.usefixtures("affinity")
def test_hyper_threads_of_a_core_count_once(tmp_path: Path) -> None:
    machine(tmp_path, TWO_SOCKETS)
    assert processors.thread_count(tmp_path) == 4
    assert processors.sockets(tmp_path) == 2


def test_an_affinity_leaves_out_cores_and_sockets(tmp_path: Path, affinity: set[int]) -> None:
    machine(tmp_path, TWO_SOCKETS)
    affinity -= {2, 3, 5, 6, 7}
    assert processors.thread_count(tmp_path) == 2
    assert processors.sockets(tmp_path) == 1
    assert processors.shares(2, tmp_path) == ("0,4", "1")


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize(
    ("text", "files", "threads"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/pods/x\n", {"cpu.max": "200000 100000\n"}, 2),
        (
            "4:cpu,cpuacct:/box\n0::/\n",
            {"cpu/box/cpu.cfs_quota_us": "200000\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        (
            "4:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4,
        ),
    ],
)
def test_the_limit_of_a_control_group_is_kept(
    tmp_path: Path, text: str, files: dict[str, str], threads: int
) -> None:
    machine(tmp_path, TWO_SOCKETS)
    group(tmp_path, text, files)
    assert processors.thread_count(tmp_path) == threads


@pytest.mark.usefixtures("affinity")
def test_workers_share_whole_cores_and_stay_on_their_sockets(tmp_path: Path) -> None:
    machine(tmp_path, TWO_SOCKETS)
    assert processors.shares(1, tmp_path) == ("0,4,1,5,2,6,3,7",)
    assert processors.shares(2, tmp_path) == ("0,4,1,5", "2,6,3,7")
    assert processors.shares(3, tmp_path) == ("0,4", "1,5", "2,6,3,7")
    assert processors.shares(5, tmp_path) == ("0,4", "0,4", "1,5", "2,6", "3,7")


@pytest.mark.usefixtures("affinity")
def test_a_machine_that_tells_no_topology_has_a_core_for_each_processor(tmp_path: Path) -> None:
    assert processors.thread_count(tmp_path) == 8
    assert processors.sockets(tmp_path) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process")
def test_a_bound_process_stays_on_its_processors() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        assert not processors.bind(f"{one}-{one},100000-{10**30}")
        assert os.sched_getaffinity(0) == {one}
        assert processors.thread_count() == 1
        assert processors.bind(f"{one}-{one},{one}")
    finally:
        os.sched_setaffinity(0, before)


def test_a_list_without_a_usable_processor_is_refused(affinity: set[int]) -> None:
    assert 100000 not in affinity
    with pytest.raises(ValueError, match="no usable processor"):
        processors.bind("100000")


def test_only_processors_of_the_affinity_count_as_idle(tmp_path: Path, affinity: set[int]) -> None:
    affinity.intersection_update({1})
    affinity.add(10)
    (tmp_path / "proc").mkdir()
    lines = ["cpu  9 9 9 3600 9 9", "cpu0 1 1 1 800 1", "cpu1 1 1 1 900 1", "cpu10 1 1 1 1900 1"]
    (tmp_path / "proc/stat").write_text("\n".join([*lines, "intr 1 2 3 4 5", "ctxt 5", ""]))
    assert processors.idle_s(tmp_path) == 2800 / os.sysconf("SC_CLK_TCK")
    assert processors.idle_s(tmp_path / "none") == 0
