"""``llorch bench report`` puts saved runs on one page and skips files without a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from llorch_worker.bench.report import KINDS, read_run
from llorch_worker.cli import bench
from llorch_worker.contract.installing import install_command
from tests.cli.command import run
from tests.cli.test_bad_input import WORKER_MODULES, packages_without, sentence


def engine_run(decode: float, command: str = "llorch bench engine --json") -> dict[str, Any]:
    """As ``llorch bench engine --json`` saves it, in part."""
    return {
        "provenance": {
            "command": command,
            "environment": {"OMP_NUM_THREADS": "1"},
            "machine": {
                "processor": "A Processor", "vector_unit": "AVX2", "usable_cpus": 2,
                "memory_bytes": 2**30, "system": "Linux", "device": "cpu", "load_1min": None,
            },
            "versions": {"torch": "9.9"},
            "threads": 1,
            "seed": 0,
        },
        "prompt_tokens": 128,
        "rows": [
            {"kind": "measured", "concurrency": 1, "decode_tokens_per_s": decode},
            {"kind": "skipped", "concurrency": 64, "reason": "needs more <KV> blocks"},
        ],
    }  # fmt: skip


def saved(folder: Path, name: str, document: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_page_compares_runs_with_the_first_and_says_where_they_come_from(tmp_path: Path) -> None:
    runs = [saved(tmp_path, f"{rate}.json", engine_run(rate)) for rate in (100, 123.4)]
    out = tmp_path / "report.html"
    ran = run("bench", "report", *runs, "--out", out)
    assert ran.out == f"wrote 2 runs to {out}\n", ran
    page = out.read_text(encoding="utf-8")
    page = page[page.rindex("<h1>") :]  # plotly's own script comes before
    for line in ("$ OMP_NUM_THREADS=1 llorch bench engine --json", "A Processor (AVX2), 2 CPUs"):
        assert page.count(line) == 2
    assert page.count("concurrency 64: needs more &lt;KV&gt; blocks") == 2
    assert page.count("Plotly.newPlot(") == 1
    row = "<td>concurrency 1, prompt tokens 128<td>100<td>123.4<td>1.234"
    assert row in page, "the table under the plot"
    assert not re.findall(r'(?:src|href)="', page), "it needs nothing beside itself"


def test_pytest_benchmarks_files_are_read(tmp_path: Path) -> None:
    document = {"benchmarks": [{"name": "test_rope[8]", "stats": {"median": 0.25}}]}
    found = read_run(saved(tmp_path, "parts.json", document))
    assert found.figures == {"benchmarks stats median": {"test_rope[8]": 0.25}}


def test_every_command_that_measures_has_its_plots() -> None:
    commands = {command.name for command in bench.app.registered_commands}
    assert commands - {"report"} < KINDS.keys()


def assert_all_read(document: Any, folder: Path) -> None:
    """Every figure with a plot is found in the document of a run."""
    found = read_run(saved(folder, "real.json", document))
    assert found.kind == document["provenance"]["command"].split()[2]
    (part,) = KINDS[found.kind]
    assert len(found.figures) == len(part.figures)


def test_files_without_a_run_are_skipped_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    files = (
        tmp_path / "none.json",
        broken,
        saved(tmp_path, "foreign.json", [1, 2]),
        saved(tmp_path, "tea.json", engine_run(1, "llorch bench tea")),
        saved(tmp_path, "empty.json", {**engine_run(1), "rows": "gone"}),
    )
    reasons = (
        "none.json: No such file or directory",
        "broken.json: it is not JSON",
        "foreign.json: it does not say which command of llorch bench saved it",
        "tea.json: llorch bench tea has no plots; allowed: engine, overhead",
        "empty.json: it holds no figures of engine",
    )
    out = tmp_path / "report.html"
    said = sentence(run("bench", "report", *files, "--out", out), 1)
    assert said.startswith("no file holds a run (")
    assert [said.count(reason) for reason in reasons] == [1] * 5
    assert not out.exists()
    ran = run("bench", "report", *files, saved(tmp_path, "one.json", engine_run(1)), "--out", out)
    assert ran.code == 0, ran
    said = " ".join(ran.err.split())
    assert [said.count(reason) for reason in reasons] == [1] * 5
    assert out.exists()


def test_files_are_checked_before_the_extra_is_asked_for(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    packages_without(site, *WORKER_MODULES, "plotly")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    for file, why in (
        (tmp_path / "none.json", "No such file or directory"),
        (broken, "it is not JSON"),
        (
            saved(tmp_path, "run.json", engine_run(100)),
            f"needs the bench extra: {install_command('bench')}",
        ),
    ):
        ran = run("bench", "report", file, python_options=("-S",), site=site)
        assert why in sentence(ran, 1)
