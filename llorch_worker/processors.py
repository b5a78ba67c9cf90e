"""The processors that this process may use, and how CPU workers share them. Uses no torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from llorch_worker import control_groups
from llorch_worker.control_groups import ROOT


@dataclass(frozen=True, order=True)
class Processor:
    """A hardware thread, as Linux numbers it."""

    package: int
    """The socket; its memory is near."""
    core: int
    """Hyper-threads of one core have the same number, unique within the package."""
    number: int


def usable_processors(root: Path = ROOT) -> tuple[Processor, ...]:
    """Those of this process' affinity, by socket and core. ``root`` holds ``sys``."""
    return tuple(sorted(_processor(number, root) for number in _affinity()))


def thread_count(root: Path = ROOT) -> int:
    """How many threads compute best: one for each core, within the limit of the control group.

    Two hyper-threads of one core share its arithmetic units. ``root`` holds ``sys`` and ``proc``.
    """
    cores = len({(each.package, each.core) for each in usable_processors(root)})
    return max(1, min([cores, *(int(limit) for limit in _limits(root))]))


def idle_s(root: Path = ROOT) -> float:
    """For how many seconds this process' processors have been idle, all together; 0 if unknown."""
    numbers = {f"cpu{number}" for number in _affinity()}
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    idle = (line.split()[4] for line in lines if line.split(maxsplit=1)[0] in numbers)
    return sum(map(int, idle)) / os.sysconf("SC_CLK_TCK")


def involuntary_switches() -> int:
    """How often a thread of this process has lost its processor to another."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def sockets(root: Path = ROOT) -> int:
    return len({each.package for each in usable_processors(root)})


def shares(workers: int, root: Path = ROOT) -> tuple[str, ...]:
    """The processors of each of several workers, for :func:`bind`: whole cores that lie together.

    Workers share cores only if there are more workers than cores.
    """
    usable = usable_processors(root)
    cores = list(dict.fromkeys((each.package, each.core) for each in usable))
    bounds = [len(cores) * worker // workers for worker in range(workers + 1)]
    parts = (cores[first : max(end, first + 1)] for first, end in pairwise(bounds))
    return tuple(
        ",".join(str(each.number) for each in usable if (each.package, each.core) in part)
        for part in parts
    )


def bind(listed: str) -> bool:
    """Keeps the calling thread, and those that it starts later, on the processors of a list such as
    ``0-7,16``. Linux then takes memory from their socket. Returns whether all of them are usable;
    raises ``ValueError`` if none is.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("this system cannot bind a process to processors")
    usable, asked = set(_affinity()), list(_ranges(listed))
    bound = {number for number in usable if any(number in numbers for numbers in asked)}
    if not bound:
        known = ",".join(map(str, sorted(usable)))
        raise ValueError(f"no usable processor in {listed!r}; usable: {known}")
    os.sched_setaffinity(0, bound)
    return all(
        sum(number in numbers for number in bound) == max(0, numbers.stop - numbers.start)
        for numbers in asked
    )


def _affinity() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _processor(number: int, root: Path) -> Processor:
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    try:
        package = int((topology / "physical_package_id").read_text())
        core = min(_numbers((topology / "thread_siblings_list").read_text()))
    except (OSError, ValueError):
        return Processor(0, number, number)
    return Processor(package, core, number)


def _numbers(listed: str) -> Iterator[int]:
    return chain.from_iterable(_ranges(listed))


def _ranges(listed: str) -> Iterator[range]:
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        yield range(int(first), int(last or first) + 1)


def _limits(root: Path) -> Iterator[float]:
    """The limits of this process' control group and of those around it, in processors."""
    for folder, version in control_groups.folders("cpu", root):
        if version == 1:
            quota = _words(folder / "cpu.cfs_quota_us")
            period = _words(folder / "cpu.cfs_period_us")
            if quota and period and int(quota[0]) > 0:
                yield int(quota[0]) / int(period[0])
        else:
            most, *rest = _words(folder / "cpu.max") or ["max"]
            if most != "max":
                yield int(most) / int(rest[0])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
