"""Models by name, from a hub on loopback. Each look-up is a process: HF_* is read once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.settings import default_model_name
from tests.hub import COMMIT, Hub, running_hub
from tests.waiting import wait_until

STORY = STORY_MODEL.read_bytes()
LOOK_UP = """
import sys
from pathlib import Path
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.hub import local_path
for name in sys.argv[1:]:
    try:
        print(local_path(Path(name)))
    except ModelLoadFailed as error:
        print("MODEL_LOAD_FAILED", error.message)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    folder = {"config.json": b"{}", "tokenizer.json": b"{ }", "README.md": b"words"}
    folder |= {"modules.json": b"[]", "1_Pooling/config.json": b"{  }", "onnx/config.json": b"o"}
    weights = {"model-00001-of-00001.safetensors": b"w" * 100, "consolidated.safetensors": b"c"}
    split = {f"big-Q8_0-0000{i}-of-00002.gguf": b"GGUF%d" % i for i in (1, 2)}
    several = {"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8", "mmproj-m.gguf": b"GGUFp"}
    several |= {"m-Q6_K.gguf": b"GGUF6", "m-Q6_K_L.gguf": b"GGUF6l", "m-Q3_K_S.gguf": b"GGUF3"}
    repos = {"me/one": {"story.gguf": STORY}, "me/several": several, "me/split": split}
    with running_hub(repos | {"me/folder": folder | weights}) as running:
        yield running


class Machine:
    def __init__(self, hub: Hub, home: Path) -> None:
        self.home = home
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LLORCH_"))}
        self.environment = inherited | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **variables: str) -> str:
        return self.start(*command, **variables).communicate(timeout=120)[0].strip()

    def look_up(self, *names: str, **variables: str) -> str:
        """A line for each name."""
        return self.run("-c", LOOK_UP, *names, **variables)


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path / "hf")


def test_the_only_gguf_file_is_downloaded_once_and_then_found_offline(
    hub: Hub, machine: Machine
) -> None:
    path = Path(machine.look_up("hf:me/one", HF_TOKEN="hf_secret"))
    assert path.name == "story.gguf"
    assert path.read_bytes() == STORY
    assert "Bearer hf_secret" in hub.tokens
    assert machine.look_up(f"hf:me/one:story.gguf@{COMMIT}") == str(path)
    assert machine.look_up("hf:me/one", HF_HUB_OFFLINE="1") == str(path)
    assert machine.look_up("hf:me/one", HF_ENDPOINT="http://127.0.0.1:9") == str(path)
    assert [file for file, _ in hub.served] == ["story.gguf"]


def test_a_download_that_is_cut_goes_on_where_it_ended(hub: Hub, machine: Machine) -> None:
    # The library writes 10 MB at a time.
    hub.repos["me/one"]["story.gguf"] = large = STORY * (30_000_000 // len(STORY) + 1)
    hub.cut_after = 25_000_000
    assert Path(machine.look_up("hf:me/one")).read_bytes() == large
    (_, whole), (_, rest) = hub.served
    assert whole is None
    assert rest is not None
    assert int(rest.removeprefix("bytes=").split("-")[0]) >= 10_000_000


STOPPED = """
import sys
from pathlib import Path
from llorch_worker.model_files.hub import local_path
def meanwhile():
    if {stops} and any(Path(sys.argv[1]).rglob("*.incomplete")):
        raise SystemExit("the worker stops")
local_path(Path("hf:me/one"), meanwhile=meanwhile)
"""


@pytest.mark.parametrize("by", ["Ctrl-C", "its caller"])
def test_a_download_ends_at_once_and_leaves_nothing(hub: Hub, machine: Machine, by: str) -> None:
    hub.repos["me/one"]["story.gguf"] = STORY * (20_000_000 // len(STORY) + 1)
    hub.stalls_after = 15_000_000
    downloading = machine.start("-c", STOPPED.format(stops=by == "its caller"), str(machine.home))
    wait_until(lambda: list(machine.home.rglob("*.incomplete")))
    if by == "Ctrl-C":
        downloading.send_signal(signal.SIGINT)
    words = downloading.communicate(timeout=120)[1]
    assert ("KeyboardInterrupt" if by == "Ctrl-C" else "the worker stops") in words
    assert downloading.returncode
    assert not list(machine.home.rglob("*.incomplete"))
    assert not hub.goes_on.is_set()


def test_what_a_killed_download_left_goes_with_the_next_one(hub: Hub, machine: Machine) -> None:
    blobs = machine.home / "hub" / "models--me--one" / "blobs"
    blobs.mkdir(parents=True)
    left, written = blobs / "a.1.incomplete", blobs / "b.2.incomplete"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    written.write_bytes(b"half")
    assert machine.look_up("hf:me/one").endswith("story.gguf")
    assert not left.exists()
    assert written.exists()


def test_processes_that_start_together_download_once(hub: Hub, machine: Machine) -> None:
    both = [machine.start("-c", LOOK_UP, "hf:me/one") for _ in range(2)]
    first, second = (each.communicate(timeout=120)[0] for each in both)
    assert first == second
    assert [file for file, _ in hub.served] == ["story.gguf"]


def test_a_quantisation_all_parts_and_only_needed_files_are_chosen(
    hub: Hub, machine: Machine
) -> None:
    names = ("hf:me/several:q8_0", "hf:me/several:q6_K", "hf:me/several:Q3_K")
    one, plain, longer = machine.look_up(*names).split()
    split, name = machine.look_up("hf:me/split", "hf:me/folder").split()
    assert one.endswith("m-Q8_0.gguf")
    assert plain.endswith("m-Q6_K.gguf")
    assert longer.endswith("m-Q3_K_S.gguf")
    assert split.endswith("big-Q8_0-00001-of-00002.gguf")
    folder = Path(name)
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        "1_Pooling/config.json",
        "config.json",
        "modules.json",
        "tokenizer.json",
        "model-00001-of-00001.safetensors",
    }
    assert len(hub.served) == 3 + 2 + 5


def test_what_cannot_be_had_is_one_sentence(hub: Hub, machine: Machine) -> None:
    hub.repos["me/gated"] = {"story.gguf": STORY}
    hub.gated.add("me/gated")
    hub.repos["me/huge"] = {"huge.gguf": b"GGUF"}
    hub.announced_sizes["huge.gguf"] = 10**18
    faults = {
        "hf:me/typo": "does not exist on the hub",
        "hf:me": "not of the form",
        "hf:me/one@nowhere": "no such revision",
        "hf:me/one:Q2_K": "no .gguf file Q2_K",
        "hf:me/several": "m-Q3_K_S.gguf, m-Q4_0.gguf, m-Q6_K.gguf, m-Q6_K_L.gguf, m-Q8_0.gguf.",
        "hf:me/gated": "is gated",
        "hf:me/huge": "free some",
    }
    answers = machine.look_up(*faults).splitlines()
    for (name, words), answer in zip(faults.items(), answers, strict=True):
        assert answer.startswith(f"MODEL_LOAD_FAILED {name}"), answer
        assert words in answer
    assert "not in the cache" in machine.look_up("hf:me/one", HF_HUB_OFFLINE="1")


def test_inspect_reads_a_model_by_name_and_models_lists_and_removes_it(machine: Machine) -> None:
    cli = ("-m", "llorch_worker.cli")
    document = json.loads(machine.run(*cli, "inspect", "hf:me/one", "--json"))
    assert document["name"] == "one"
    (listed,) = json.loads(machine.run(*cli, "models", "--json"))
    assert (listed["name"], listed["revision"]) == ("hf:me/one", COMMIT)
    assert listed["bytes"] == len(STORY)
    machine.run(*cli, "models", "remove", "hf:me/one")
    assert json.loads(machine.run(*cli, "models", "--json")) == []


def test_jobs_ask_for_a_model_of_the_hub_by_its_name() -> None:
    assert default_model_name(Path("hf:me/Tiny-GGUF:Q4_K_M@main")) == "Tiny-GGUF"
