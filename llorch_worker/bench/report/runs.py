"""Saved JSON documents to runs: of ``llorch bench``, and pytest-benchmark's own files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llorch_worker.bench.report.fields import at, number, rows, text
from llorch_worker.bench.report.kinds import KINDS, Document
from llorch_worker.bench.report.readings import Metric, NotARun, Reading, Run
from llorch_worker.contract.quantities import counted, human_bytes

COMPONENTS = "components"
MICROSECONDS = 1e6


def read_run(path: Path) -> Run:
    """Raises ``NotARun`` for a file that is none, or that cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotARun(error.strerror or str(error)) from None
    except ValueError:
        raise NotARun("it is not JSON") from None
    if not isinstance(document, dict):
        raise NotARun("it is not a JSON object")
    run = _components(path, document) if "benchmarks" in document else _bench(path, document)
    if not run.readings:
        raise NotARun(f"it holds no figures of llorch bench {run.kind}")
    return run


def _bench(path: Path, document: Document) -> Run:
    command = text(document, "provenance.command")
    name = kind_of(command)
    if name is None:
        raise NotARun("no command of llorch bench is noted in it")
    kind = KINDS.get(name)
    if kind is None:
        raise NotARun(f"there are no plots of llorch bench {name}")
    return Run(
        path=path,
        kind=name,
        load=kind.load(document),
        subject=kind.subject(document),
        origin=tuple(_origin(document)),
        readings=tuple(kind.readings(document)),
        notes=tuple(kind.notes(document)),
    )


def kind_of(command: str) -> str | None:
    """``engine`` for ``llorch bench engine --model ...``."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    return words[2] if words[:2] == ["llorch", "bench"] and len(words) > 2 else None


def _origin(document: Document) -> Iterator[str]:
    """The lines that ``llorch bench`` prints above its tables."""
    origin = at(document, "provenance")
    environment = at(origin, "environment")
    settings = [f"{name}={value}" for name, value in (environment or {}).items()]
    yield " ".join(["$", *settings, text(origin, "command")])
    machine = at(origin, "machine")
    memory = number(machine, "memory_bytes")
    load = number(machine, "load_1min")
    yield _commas(
        f"{text(machine, 'processor')} ({text(machine, 'vector_unit')})",
        _counted(machine, "usable_cpus", "CPU"),
        "" if memory is None else human_bytes(memory),
        text(machine, "system"),
        f"device {text(machine, 'device')}",
        "" if load is None else f"load {load:.1f} when it began",
    )
    versions = at(origin, "versions")
    yield _commas(
        *(f"{name} {version}" for name, version in (versions or {}).items()),
        _counted(origin, "threads", "thread"),
        f"seed {text(origin, 'seed')}",
    )


def _components(path: Path, document: Document) -> Run:
    return Run(
        path=path,
        kind=COMPONENTS,
        load="",
        subject=_commit(document),
        origin=tuple(_components_origin(document)),
        readings=tuple(_component_readings(document)),
        notes=(),
    )


def _commit(document: Document) -> str:
    """Empty outside a repository, where pytest-benchmark has a word for it."""
    found = text(document, "commit_info.id")
    return f"commit {found[:10]}" if re.fullmatch("[0-9a-f]{16,}", found) else ""


def _component_readings(document: Document) -> Iterator[Reading]:
    """Medians: a mean would hang on the few rounds that something disturbed."""
    found = [
        (text(each, "group") or "no group", _parameters(text(each, "name")), median)
        for each in rows(document, "benchmarks")
        if (median := number(each, "stats.median")) is not None
    ]
    for group, parameters, median in sorted(found, key=lambda each: (each[0], _natural(each[1]))):
        yield Reading(Metric(group, "µs", "lower", wide=True), parameters, median * MICROSECONDS)


def _parameters(name: str) -> str:
    """``float32-8`` of ``test_rope_forward[float32-8]``."""
    inside = re.search(r"\[(.*)\]$", name)
    return inside[1] if inside else name.removeprefix("test_")


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """An order in which 8 comes before 32."""
    return tuple(
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)
    )


def _components_origin(document: Document) -> Iterator[str]:
    machine: Any = at(document, "machine_info")
    command = text(document, "command")
    yield f"$ {command}" if command else "saved by pytest-benchmark, which notes no command"
    yield _commas(
        text(machine, "cpu.brand_raw"),
        _counted(machine, "cpu.count", "CPU"),
        f"{text(machine, 'system')} {text(machine, 'release')} {text(machine, 'machine')}",
    )
    yield _commas(
        f"python {text(machine, 'python_version')}",
        f"torch {text(machine, 'torch.version')}" if at(machine, "torch") else "",
        _counted(machine, "torch.threads", "thread"),
        f"pytest-benchmark {text(document, 'version')}",
        _commit(document),
        text(document, "datetime"),
    )


def _counted(document: Any, path: str, noun: str) -> str:
    """Empty where no number is noted."""
    found = number(document, path)
    return "" if found is None else counted(int(found), noun)


def _commas(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
