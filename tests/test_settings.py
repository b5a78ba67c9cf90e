"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from llorch_worker.contract.command_errors import explain
from llorch_worker.demo_model import CHAT_FILE, CHAT_PACKAGE, STORY_MODEL, demo_model
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.misspelt import misspelt
from llorch_worker.settings import Settings, default_model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/tiny.gguf", "tiny"),
        ("llama-2-7b.Q4_K_M.gguf", "llama-2-7b.Q4_K_M"),
        ("my model (1).gguf", "my-model-1-"),
        ("models/tiny/", "tiny"),
        ("a:b@c.gguf", "a-b-c"),
    ],
)
def test_a_model_is_named_after_its_file_as_a_queue_allows(path: str, name: str) -> None:
    assert default_model_name(Path(path)) == name


def test_demo_is_the_chat_model_of_a_package_else_the_story_model_and_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {"LLORCH_MODEL": "demo"})
    assert Settings().model == demo_model() == STORY_MODEL
    package = tmp_path / CHAT_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    assert demo_model() == STORY_MODEL, "a package without the file"
    chat = package / CHAT_FILE
    chat.touch()
    assert Settings().model == chat
    assert Settings().served_name == "demo"
    assert Settings(model=chat).served_name == "demo", "in a child, which is given the path"
    (tmp_path / "demo").mkdir()
    assert Settings().model == Path("demo"), "a folder of this name comes first"


@pytest.mark.parametrize(
    ("written", "size"),
    [("1000", 1000), ("8GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5 gib", 3 * 2**29)],
)
def test_a_size_may_have_a_unit(written: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_KV_CACHE_BYTES", written)
    monkeypatch.setenv("LLORCH_GATEWAY_MAX_FILE_BYTES", written)
    assert Settings().kv_cache_bytes == GatewaySettings().max_file_bytes == size
    assert Settings().environment["LLORCH_KV_CACHE_BYTES"] == str(size), "as a child reads it"


def test_a_variable_that_nothing_reads_is_named_with_the_nearest_setting() -> None:
    both = Settings, GatewaySettings
    known = {
        f"{kind.model_config['env_prefix']}{n.upper()}" for kind in both for n in kind.model_fields
    }
    others = {"LLORCH_TEST_REDIS", "LLORCH_REDIS_SERVICE_HOST", "LLORCH_MODELS_DIR", "PATH"}
    wrong = {
        "LLORCH_MAX_SEQUENCE": "LLORCH_MAX_SEQUENCES",
        "LLORCH_GATEWAY_PROT": "LLORCH_GATEWAY_PORT",
        "LLORCH_REDIS": "LLORCH_REDIS_URL",
        "LLORCH_XYZZY": "",
    }
    environment = dict.fromkeys((*known, *others, *wrong), "1")
    assert misspelt(*both, environment=environment) == wrong
    del wrong["LLORCH_GATEWAY_PROT"]
    assert misspelt(Settings, environment=environment) == wrong, "a gateway's are its own"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e10", "1e300"])
@pytest.mark.parametrize("kind", [Settings, GatewaySettings])
def test_a_time_that_no_timer_takes_is_refused(
    kind: type[Settings] | type[GatewaySettings], value: str
) -> None:
    times = {name: value for name in kind.model_fields if name.endswith("_s")}
    assert times
    with pytest.raises(ValidationError) as refused:
        kind(**times)
    assert {error["loc"] for error in refused.value.errors()} == {(name,) for name in times}
    kind(**dict.fromkeys(times, 10**9))  # type: ignore[arg-type]


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    unset = Settings()
    for name in Settings.model_fields:
        monkeypatch.setenv(f"LLORCH_{name.upper()}", "")
    assert Settings() == unset
    assert Settings().model_fields_set == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLORCH_DRAFTER", "model"),
        ("LLORCH_SPECULATION", "off"),
        ("LLORCH_DRAFT_MODEL", "small.gguf"),
    ],
)
def test_the_draft_model_and_the_former_name_of_its_setting_are_said_to_be_removed(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {name: value})
    with pytest.raises(ValidationError) as refused:
        Settings()
    answer = explain(refused.value)
    assert answer is not None
    got = "model" if name == "LLORCH_DRAFTER" else "auto"
    assert answer[0].message == (
        "LLORCH_DRAFTER: must be auto, off, lookup or suffix, without LLORCH_SPECULATION, the "
        "former name, and without LLORCH_DRAFT_MODEL: the draft model was removed "
        f"(got {got!r})"
    )
    assert answer[1] == 2


def test_the_model_in_the_package_stays_small() -> None:
    assert 0 < STORY_MODEL.stat().st_size <= 4 * 2**20


def test_several_models_are_each_served_under_the_name_of_their_file(tmp_path: Path) -> None:
    settings = Settings(models="a.gguf, models/b.gguf", pin="b", dtype="float32")
    assert Settings(model="x.gguf", models="a.gguf").served_name == "x", "of llorch generate"
    assert settings.served_names == ("a", "b")
    assert [each.dtype for each in settings.of_each_model] == ["float32", "float32"]
    (tmp_path / "c.gguf").touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").touch()
    (tmp_path / "notes.txt").touch()
    assert Settings(models_folder=tmp_path).served_names == ("c", "d")
    assert Settings(models="a.gguf", models_folder=tmp_path).served_names == ("a", "c", "d")
    assert Settings(model="a.gguf", model_name="x").served_names == ("x",)


def test_a_model_may_be_a_servers_alone_or_among_several() -> None:
    alone = Settings(model="http://h:8000/v1/=Qwen/Qwen3-8B")
    assert alone == Settings(engine_url="http://h:8000/v1", model="Qwen/Qwen3-8B")
    assert (alone.served_name, alone.computes_here, alone.seats) == ("Qwen3-8B", False, 1)
    several = Settings(models="a.gguf,http://h:8000/v1=Qwen/Qwen3-8B,b.gguf,https://i/v1=c=d")
    assert several.served_names == ("a", "Qwen3-8B", "b", "c-d")
    urls = [each.engine_url for each in several.of_each_model]
    assert urls == [None, "http://h:8000/v1", None, "https://i/v1"]
    assert (several.computes_here, several.seats) == (True, 3)
    servers = Settings(models="http://h/v1=c,http://i/v1=d")
    assert (servers.computes_here, servers.seats) == (False, 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"resident": 3}, "must be at most 2, as many as there are models"),
        (
            {"models": "a.gguf,http://h/v1=b", "resident": 2},
            "must be at most 1, as many as there are models that are no server's",
        ),
        ({"models": "a.gguf,http://h/v1"}, "must be http://host:port/v1=NAME for a server"),
        ({"models": "a.gguf,http://u:p@h/v1=b"}, "without a user or a key"),
        ({"models": "a.gguf,http://h/v1=owner/a"}, "would both be served as a"),
        ({"models": "", "model": "https://h/v1"}, "must be http://host:port/v1=NAME"),
        (
            {"models": "", "model": "http://h/v1=a", "engine_url": "http://h/v1"},
            "without --engine",
        ),
        ({"pin": "c"}, "must be a model of this worker, which has a, b"),
        ({"models": "", "pin": "c"}, "which has one model alone, which it keeps"),
        ({"models": "", "resident": 2}, "must be at most 1"),
        ({"model_name": "x"}, "names one model: leave it out with several"),
        ({"pooling": "last"}, "is for one model"),
        ({"models": "a.gguf,other/a.gguf"}, "names two models that would both be served as a"),
        (
            {"models": "", "models_folder": "/nowhere"},
            "LLORCH_MODELS_FOLDER /nowhere holds no model",
        ),
        ({"engine_url": "http://h/v1"}, "serves one model: name it with LLORCH_MODEL"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(
    given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Settings(**({"models": "a.gguf,b.gguf"} | given))
