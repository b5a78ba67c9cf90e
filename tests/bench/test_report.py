"""``llorch bench report`` puts saved runs on one page, and says what it could not read."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.bench.report.kinds import KINDS
from llorch_worker.bench.report.numbers import gain, shown
from llorch_worker.bench.report.page import TITLES
from llorch_worker.bench.report.readings import NotARun
from llorch_worker.bench.report.runs import COMPONENTS as PARTS
from llorch_worker.bench.report.runs import kind_of, read_run
from llorch_worker.cli import bench
from tests.cli.command import Ran, run
from tests.cli.test_bad_input import sentence


def provenance(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "environment": {"OMP_NUM_THREADS": "1"},
        "machine": {"processor": "A Processor", "vector_unit": "AVX2", "usable_cpus": 2},
        "versions": {"torch": "9.9"},
        "threads": 1,
        "seed": 0,
    }


def engine_run(decode: float, prompt_tokens: int = 128, **row: Any) -> dict[str, Any]:
    """As ``llorch bench engine --json`` saves it, in part: what is missing is left out."""
    return {
        "provenance": provenance("llorch bench engine --model some.gguf --json"),
        "model": "/models/some.gguf",
        "dtype": "bfloat16",
        "prompt_tokens": prompt_tokens,
        "new_tokens": 32,
        "rows": [
            {"kind": "measured", "concurrency": 1, "decode_tokens_per_s": decode, **row},
            {"kind": "skipped", "concurrency": 64, "reason": "needs more <KV> blocks"},
        ],
    }


COMPONENTS = {
    "machine_info": {"cpu": {"brand_raw": "A Processor", "count": 2}, "python_version": "3.11"},
    "commit_info": {"id": "0123456789abcdef"},
    "version": "5.0",
    "datetime": "2026-01-02T03:04:05",
    "benchmarks": [
        {
            "group": "rope_forward",
            "name": f"test_rope_forward[float32-{tokens}]",
            "stats": {"median": tokens / 1e6},
        }
        for tokens in (128, 8)
    ],
}


def saved(folder: Path, name: str, document: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def made(folder: Path, *runs: Path) -> tuple[str, Ran]:
    """The page of ``runs``, and what the command said."""
    out = folder / "report.html"
    ran = run("bench", "report", *runs, "--out", out)
    assert ran.code == 0, ran
    return out.read_text(encoding="utf-8"), ran


class Strict(HTMLParser):
    """Fails on elements that are not closed as they were opened."""

    VOID = frozenset({"meta", "path", "use", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    text, _ = made(
        tmp_path,
        saved(tmp_path, "one.json", engine_run(100)),
        saved(tmp_path, "parts.json", COMPONENTS),
    )
    parser = Strict()
    parser.feed(text.removeprefix("<!doctype html>"))
    assert parser.open == []
    assert text.count("<svg") == 2
    for outside in ("<script", "<link", "src=", "@import", "url(http"):
        assert outside not in text
    identities = re.findall(r' id="([^"]+)"', text)
    for target in re.findall(r'(?:href="|url\()#([\w-]+)', text):
        assert target in identities


def test_a_table_stands_under_every_plot_with_machine_versions_and_command(tmp_path: Path) -> None:
    text, _ = made(tmp_path, saved(tmp_path, "one.json", engine_run(123.4)))
    (table,) = re.findall(r"</svg>\s*<div class=\"table\">(.*?)</table>", text, re.DOTALL)
    assert "<td>123.4</td>" in table
    for origin in (
        "$ OMP_NUM_THREADS=1 llorch bench engine --model some.gguf --json",
        "A Processor (AVX2), 2 CPUs",
        "torch 9.9, 1 thread, seed 0",
    ):
        assert origin in text
    assert "64 sequences: needs more &lt;KV&gt; blocks" in text


def test_runs_of_the_same_load_are_compared_with_the_first(tmp_path: Path) -> None:
    runs = [saved(tmp_path, f"{rate}.json", engine_run(rate)) for rate in (100, 150, 95, 50)]
    text, _ = made(tmp_path, *runs)
    assert "A = 100.json" in text
    assert "D = 50.json" in text
    for cell in ('<td class="better">1.50</td>', "<td>0.95</td>", '<td class="worse">0.50</td>'):
        assert cell in text


def test_runs_of_other_loads_are_plotted_over_their_size(tmp_path: Path) -> None:
    runs = [saved(tmp_path, f"{n}.json", engine_run(100, n)) for n in (128, 512, 2048)]
    text, _ = made(tmp_path, *runs)
    assert "over prompt tokens" in text
    assert 'aria-label="decode, tokens/s, over prompt tokens"' in text
    assert "B / A" not in text


def test_jobs_through_redis_are_plotted_over_their_number(tmp_path: Path) -> None:
    way = {"jobs_per_s": 2.0, "tokens_per_s": 64.0}
    document = {
        "provenance": provenance("llorch bench queue --model some.gguf --json"),
        "model": "some.gguf",
        "dtype": "float32",
        "concurrency": 16,
        "prompt_tokens": [16, 256],
        "new_tokens": [8, 64],
        "rows": [
            {"jobs": jobs, "straight": way, "queued": way, "share": 0.99} for jobs in (10, 100)
        ],
        "single": {"added_p50_ms": 2.5},
        "no_op": {
            "ours": {"run_per_s": 900.0},
            "stock": {"run_per_s": 700.0},
            "ours_alone_ms": {"p50": 3.25},
        },
    }
    text, _ = made(tmp_path, saved(tmp_path, "queue.json", document))
    assert 'aria-label="tokens, tokens/s, over jobs"' in text
    assert "16 at once, 16 to 256 prompt tokens, 8 to 64 new tokens" in text
    for cell in (
        "<td>99</td>",
        "<td>2.5</td>",
        "<td>900</td>",
        "<td>3.25</td>",
        "<td>stock Celery</td>",
    ):
        assert cell in text


def test_startups_are_compared_where_they_hold_as_much(tmp_path: Path) -> None:
    def startup(name: str, context: int, ready_s: float) -> Path:
        document = {
            "provenance": provenance("llorch bench startup --model some.gguf --json"),
            "model": "some.gguf",
            "dtype": "bfloat16",
            "max_sequences": 4,
            "max_context": context,
            "ready": {"median_s": ready_s},
            "ratio": 0.75,
        }
        return saved(tmp_path, name, document)

    runs = (startup("a.json", 512, 4.0), startup("b.json", 512, 5.0), startup("c.json", 4096, 9.0))
    text, _ = made(tmp_path, *runs)
    assert "4 sequences of up to 512 tokens" in text
    assert "4 sequences of up to 4,096 tokens" in text
    assert "1.25" in text
    assert "2.25" not in text


def test_how_cost_grows_is_plotted(tmp_path: Path) -> None:
    document = {
        "provenance": provenance("llorch bench scaling --model some.gguf --json"),
        "model": "some.gguf",
        "dtype": "float32",
        "concurrency": 16,
        "prompt_tokens": 128,
        "new_tokens": 32,
        "queued": [{"queued": jobs, "tokens_per_s": 64.0} for jobs in (10, 100, 1000)],
        "contexts": [
            {"context_tokens": tokens, "prefill_tokens_per_s": 500.0, "decode_tokens_per_s": 50.0}
            for tokens in (128, 2048)
        ],
    }
    text, _ = made(tmp_path, saved(tmp_path, "scaling.json", document))
    for label in (
        "tokens with jobs waiting, tokens/s, over jobs waiting at the start",
        "prefill, tokens/s, over tokens of context",
        "decode, tokens/s, over tokens of context",
    ):
        assert f'aria-label="{label}"' in text


def test_every_command_that_measures_has_its_plots() -> None:
    commands = {command.name for command in bench.app.registered_commands}
    assert commands - {"report"} == KINDS.keys()
    assert TITLES.keys() == {*KINDS, PARTS}


def test_peers_stand_beside_us_and_those_that_could_not_run_are_named(tmp_path: Path) -> None:
    side = {"tokens_per_s": 120.0}
    document = {
        "provenance": provenance("llorch bench peers --model some.gguf --json"),
        "model": "some.gguf",
        "dtype": "bfloat16",
        "prompt_tokens": 128,
        "new_tokens": 32,
        "notes": {"llama-cpp": "with flash attention"},
        "rows": [
            {
                "kind": "decode", "peer": "llama-cpp", "sequences": 16, "prompt_tokens": 128,
                "ours": side, "theirs": {"tokens_per_s": 80.0}, "ratio": 1.5,
            },
            {"kind": "skipped", "peer": "transformers", "what": "decode", "reason": "no memory"},
        ],
    }  # fmt: skip
    text, _ = made(tmp_path, saved(tmp_path, "peers.json", document))
    for words in (
        "<td>llama-cpp, decode of 16 sequences</td><td>1.5</td>",
        "<td>16 sequences, llorch beside llama-cpp</td><td>120</td>",
        "<td>16 sequences, llama-cpp</td><td>80</td>",
        "llama-cpp: with flash attention",
        "skipped transformers, decode: no memory",
    ):
        assert words in text


def test_components_come_in_the_order_of_their_sizes(tmp_path: Path) -> None:
    found = read_run(saved(tmp_path, "parts.json", COMPONENTS))
    assert [(each.category, each.value) for each in found.readings] == [
        ("float32-8", pytest.approx(8)),
        ("float32-128", pytest.approx(128)),
    ]


def test_what_is_no_run_is_skipped_in_one_line(tmp_path: Path) -> None:
    foreign = saved(tmp_path, "foreign.json", {"figures": [1, 2]})
    unknown = saved(tmp_path, "unknown.json", {"provenance": provenance("llorch bench tea")})
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    _, ran = made(tmp_path, foreign, unknown, broken, saved(tmp_path, "one.json", engine_run(1)))
    assert ran.out == f"1 run on {tmp_path / 'report.html'}\n"
    said = " ".join(ran.err.split())
    for reason in (
        "no command of llorch bench is noted in it",
        "there are no plots of llorch bench tea",
        "it is not JSON",
    ):
        assert said.count(reason) == 1


def test_without_any_run_there_is_no_page(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    foreign = saved(tmp_path, "foreign.json", [])
    said = sentence(run("bench", "report", foreign, "--out", out), 1)
    assert said.startswith("none of these is a saved run")
    assert not out.exists()


def test_what_cannot_be_read_is_skipped_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "folder.json"
    folder.mkdir()
    run_ = saved(tmp_path, "one.json", engine_run(1))
    _, ran = made(tmp_path, tmp_path / "none.json", run_, folder)
    assert ran.out == f"1 run on {tmp_path / 'report.html'}\n"
    said = " ".join(ran.err.split())
    assert said.count("none.json: No such file or directory") == 1
    assert said.count("folder.json: Is a directory") == 1


def test_without_any_file_there_is_no_page(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    said = sentence(run("bench", "report", tmp_path / "none.json", "--out", out), 1)
    assert said.startswith("none of these is a saved run")
    assert "none.json: No such file or directory" in said
    assert not out.exists()


@pytest.mark.parametrize("damaged", ["rows", "provenance"])
def test_a_damaged_run_is_none(tmp_path: Path, damaged: str) -> None:
    document = {**engine_run(100), damaged: "gone"}
    with pytest.raises(NotARun):
        read_run(saved(tmp_path, "damaged.json", document))


@pytest.mark.parametrize("spread", [0.0, None])
def test_a_run_of_one_pass_is_read_as_it_was_and_is_saved(
    tmp_path: Path, spread: float | None
) -> None:
    path = saved(tmp_path, "one.json", engine_run(100, total_spread=spread))
    assert [reading.value for reading in read_run(path).readings] == [100]


def test_a_real_run_is_read(tmp_path: Path) -> None:
    ran = run(
        "bench", "engine", "--model", "demo", "--prompt-tokens", "8", "--new-tokens", "4",
        "--passes", "1", "--concurrency", "1,2", "--json",
    )  # fmt: skip
    path = tmp_path / "real.json"
    path.write_text(ran.out, encoding="utf-8")
    text, _ = made(tmp_path, path)
    for title in ("prefill", "decode", "total", "first token, p50", "between tokens, p99"):
        assert f"<h3>{title} <small>" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,346"), (99.123, "99.12"), (0.012361, "0.01236"), (1e-7, "1.00e-07")],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert shown(value) == text


def test_a_gain_is_more_than_a_tenth_in_the_right_direction() -> None:
    assert gain(1.11, "higher") == gain(0.9, "lower") == "better"
    assert gain(0.9, "higher") == gain(1.11, "lower") == "worse"
    assert gain(1.09, "higher") == gain(0.92, "lower") == gain(5, None) == ""


def test_the_command_tells_the_kind() -> None:
    assert kind_of("llorch bench engine --model 'a b.gguf'") == "engine"
    assert kind_of("llorch doctor") is None
    assert kind_of("llorch bench 'unclosed") is None
