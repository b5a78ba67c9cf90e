"""A damaged model file is refused with a reason, or loads and answers."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.engine_options import EngineOptions
from llorch_worker.model_files import gguf_header
from llorch_worker.model_files.bounds import Bound
from llorch_worker.text import definition_check, gguf_vocabulary, sentencepiece_file
from tests.engine.damaged_files import (
    damaged_family,
    damaged_model,
    damaged_value,
    make_families,
    outcome,
)
from tests.sizes import sized


@pytest.mark.parametrize(
    "seed", [*range(sized(usual=40, full=500)), 10572, 12102, 12849, 12880, 20296, 22071]
)
def test_a_load_of_a_damaged_file_ends(trained_model: Path, tmp_path: Path, seed: int) -> None:
    assert outcome(damaged_model(seed, trained_model, tmp_path)) in ("loaded", "MODEL_LOAD_FAILED")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_families(tmp_path_factory.mktemp("families"))


def test_a_family_loads_if_nothing_is_damaged(families: list[Path]) -> None:
    assert {path.name: outcome(path) for path in families} == {
        path.name: "loaded" for path in families
    }


@pytest.mark.parametrize("seed", range(sized(usual=60, full=500)))
def test_a_load_of_a_damaged_file_of_any_family_ends(
    families: list[Path], tmp_path: Path, seed: int
) -> None:
    ended = outcome(damaged_family(seed, families, tmp_path))
    assert ended in ("loaded", "MODEL_LOAD_FAILED")


@pytest.mark.parametrize("seed", [*range(sized(usual=60, full=3000)), 75, 1755, 2182, 2534])
def test_a_load_with_a_value_that_no_model_has_ends(
    families: list[Path], tmp_path: Path, seed: int
) -> None:
    with within(20):
        ended = outcome(damaged_value(seed, families, tmp_path))
    # The prompt may be longer than the context, or have tokens that the model lacks.
    answered = ("loaded", "loaded, INVALID_REQUEST", "loaded, CONTEXT_LENGTH_EXCEEDED")
    assert ended in (*answered, "MODEL_LOAD_FAILED")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Ends a call that waits for a pipe or reads a device for ever."""

    def late(*_: Any) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(path: Path) -> str:
    """What the refusal of a model says, in one sentence."""
    with within(20), pytest.raises(ModelLoadFailed) as raised:
        plan_load(path, EngineOptions(device="cpu", dtype="float32")).tokenizer()
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 500
    return raised.value.message


@pytest.fixture
def folder(trained_model: Path, tmp_path: Path) -> Path:
    """A small model's folder that has every file which a folder may have."""
    target = Path(shutil.copytree(trained_model / "hf", tmp_path / "model"))
    weights = load_file(target / "model.safetensors")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names = sorted(weights)
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, part in zip(shards, parts, strict=True):
        save_file({name: weights[name] for name in part}, target / shard)
    index = {name: shard for shard, part in zip(shards, parts, strict=True) for name in part}
    (target / "model.safetensors").unlink()
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if not (target / name).exists():
            (target / name).write_text("{}")
    (target / "added_tokens.json").write_text("{}")
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return target


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": put_pipe,
    "a socket": put_socket,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to what does not exist": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_in_the_place_of_a_file_is_named_at_once(folder: Path, kind: str) -> None:
    plan_load(folder, EngineOptions(device="cpu", dtype="float32")).tokenizer()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 11
    for path in files:
        aside = path.rename(folder.parent / "aside")
        KINDS[kind](path)
        said = refused(folder)
        assert f"{path} is {kind}" in said, path.name
        path.rmdir() if kind == "a folder" else path.unlink()
        aside.rename(path)
    model = folder.parent / "model.gguf"
    KINDS[kind](model)
    said = refused(model)
    assert str(model) in said
    for path in (folder / "additional_chat_templates").iterdir():
        path.unlink()
    (folder / "additional_chat_templates").rmdir()
    if kind != "a folder":
        KINDS[kind](folder / "additional_chat_templates")
        assert "additional_chat_templates is no folder" in refused(folder)


def test_a_part_of_a_split_gguf_file_that_is_a_pipe_is_named_at_once(tmp_path: Path) -> None:
    for number in (1, 2):
        os.mkfifo(tmp_path / f"m-0000{number}-of-00002.gguf")
    assert "m-00001-of-00002.gguf is" in refused(tmp_path / "m-00001-of-00002.gguf")


def grow(path: Path, size: int) -> None:
    """Longer, without taking the disk's place."""
    os.truncate(path, size)


def vocabulary(**ids: int) -> Callable[[dict[str, Any]], None]:
    return lambda definition: definition["model"]["vocab"].update(ids)


def steps(component: str, *parts: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    whole = {"type": "Sequence", key[component]: list(parts)}
    return lambda definition: definition.update({component: whole})


def around(count: int, token_id: int) -> Callable[[dict[str, Any]], None]:
    token = {"id": "<s>", "ids": [token_id], "tokens": ["<s>"]}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * count
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    whole = {"type": "TemplateProcessing", "single": single, "pair": single}
    return lambda definition: definition.update(
        post_processor=whole | {"special_tokens": {"<s>": token}}
    )


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 255}
PREPEND = {"type": "Prepend", "prepend": "x" * 257}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MAP = {
    "type": "Precompiled",
    "precompiled_charsmap": base64.b64encode(
        b"\0\4\0\0" + bytes(1024) + b"a" * 300 + b"\0"
    ).decode(),
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (vocabulary(new=3 * 10**8), "a token's id is 300000000, but may be at most 1048576"),
        (vocabulary(new=2**32 - 1), "a token's id is 4294967295"),
        (vocabulary(new=-1), "has the id -1"),
        (vocabulary(**{"x" * 5000: 1}), "is 5000, but may be at most 4096 bytes"),
        (vocabulary(**{"x" * 4000: 1, "é" * 3000: 2}), "is 6000, but may be at most 4096 bytes"),
        (
            lambda definition: definition["added_tokens"].append(
                definition["added_tokens"][0] | {"id": 2 * 10**9, "content": "new"}
            ),
            "a token's id is 2000000000",
        ),
        (steps("normalizer", *[DOUBLE] * 40), "a text in its pipeline is 4398046511104"),
        (steps("normalizer", BETWEEN, BETWEEN), "a text in its pipeline is 262144"),
        (steps("pre_tokenizer", *[BYTES] * 20), "a text in its pipeline is 1048576"),
        (steps("normalizer", PREPEND), "the length of prepend is 257, but may be at most 256"),
        (steps("normalizer", MAP), "the length of what its normalizer writes is 300"),
        (steps("decoder", *[DOUBLE] * 65), "decoder: the number of steps is 65, but may be at"),
        (steps("decoder", DOUBLE | {"content": "b" * 300}), "the length of content is 300"),
        (
            lambda definition: definition["model"].update(end_of_word_suffix="x" * 300),
            "the length of end_of_word_suffix is 300",
        ),
        (around(65, 1), "is 66, but may be at most 64"),
        (
            lambda definition: definition["model"]["vocab"].update(x="y"),
            "tokenizer.json has the id 'y', which is no token id",
        ),
        (lambda definition: definition["added_tokens"][0].pop("id"), "its settings lack 'id'"),
        (
            lambda definition: definition.update(added_tokens=5),
            "one of its settings is malformed, such as a text in the place of a list",
        ),
        (around(1, 4 * 10**9), "writes the id 4000000000, which is no token's"),
    ],
)
def test_a_definition_of_a_tokenizer_is_checked_before_it_is_used(
    folder: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    change(definition)
    path.write_text(json.dumps(definition))
    found = refused(folder)
    assert said in found
    assert str(folder) in found
    assert not re.search(r"'(int|str)'|object|iterable", found)


def decoder_of(**token: Any) -> dict[str, Any]:
    return {"added_tokens_decoder": {"300000000": {"content": "<new>", **token}}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (lambda folder, name=name: grow(folder / name, 70 * 2**20), f"{name}: its size is")
            for name in ("config.json", "generation_config.json", "tokenizer_config.json",
                "tokenizer.json", "special_tokens_map.json", "added_tokens.json",
                "chat_template.jinja", "model.safetensors.index.json")
        ),
        (
            lambda folder: grow(folder / "additional_chat_templates" / "tool_use.jinja", 10**8),
            "tool_use.jinja: its size is 100000000, but may be at most 131072 bytes",
        ),
        (
            lambda folder: (
                (folder / "chat_template.jinja").unlink(),
                (folder / "additional_chat_templates" / "tool_use.jinja").unlink(),
                edit(folder, "tokenizer_config.json", chat_template="a" * 10**7),
            ),
            "the size of a chat_template is 10000000, but may be at most 131072 bytes",
        ),
        (
            lambda folder: [
                (folder / "additional_chat_templates" / f"{number}.jinja").write_text("a")
                for number in range(64)
            ],
            "the number of chat templates is 66, but may be at most 64",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text(f"[{'[],' * 5_000_000}[]]"),
            "tokenizer.json holds 5000002 objects and lists, but may hold at most 4194304",
        ),
        (
            lambda folder: edit(folder, "tokenizer_config.json", **decoder_of()),
            "an id in added_tokens_decoder is 300000000, but may be at most 1048576",
        ),
        (
            lambda folder: (folder / "added_tokens.json").write_text('{"<new>": 4294967295}'),
            "an id in added_tokens.json is 4294967295, but may be at most 1048576",
        ),
        (
            lambda folder: edit(folder, "generation_config.json", eos_token_id=float("inf")),
            "eos_token_id is inf, which is no token id",
        ),
        (
            lambda folder: edit(folder, "config.json", max_position_embeddings=10**15),
            "max_position_embeddings is 1000000000000000, but may be at most 134217728",
        ),
        (
            lambda folder: edit(folder, "config.json", intermediate_size=10**15),
            "intermediate_size is 1000000000000000, but may be at most 2147483647",
        ),
        (
            lambda folder: edit(
                folder, "config.json",
                rope_parameters={"rope_type": "linear", "factor": 1e11, "rope_theta": 1e4},
            ),
            "the context times the factor of its RoPE scaling is",
        ),
    ],
)  # fmt: skip
def test_a_folder_is_checked_before_it_is_used(
    folder: Path, change: Callable[[Path], object], said: str
) -> None:
    change(folder)
    found = refused(folder)
    assert said in found
    assert str(folder) in found


SMALL = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
    "tokenizer.ggml.scores": [0.0] * 4,
    "tokenizer.ggml.token_type": [2, 3, 3, 1],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tokenizer.ggml.tokens": ["a", "b" * 5000]},
            "the length of the token 'bbbbbbbbbbbbbbbbbbbb' is 5000",
        ),
        (
            {"tokenizer.ggml.tokens": ["b" * 4000, "é" * 3000]},
            "the length of the token 'éééééééééééééééééééé' is 6000",
        ),
        (
            {"tokenizer.chat_template": "a" * 10**7},
            "the size of a chat_template is 10000000, but may be at most 131072 bytes",
        ),
        ({"llama.context_length": 2**30}, "context_length is 1073741824, but may be at most"),
    ],
)
def test_a_gguf_file_is_checked_before_it_is_used(
    tmp_path: Path, write_gguf: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata=SMALL | changes)
    found = refused(path)
    assert said in found
    assert str(path) in found


def test_tokens_are_counted_before_they_are_used(
    folder: Path,
    tmp_path: Path,
    write_gguf: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vocabulary of a million takes seconds to write."""
    for module in (definition_check, gguf_vocabulary, sentencepiece_file):
        monkeypatch.setattr(module, "TOKENS", Bound(40))
    assert re.search(r"tokenizer.json: the number of tokens is \d+, .* most 40", refused(folder))
    path = write_gguf(tmp_path / "m.gguf", metadata=SMALL | {"tokenizer.ggml.tokens": ["a"] * 41})
    assert "tokenizer.ggml.tokens is 41, but may be at most 40" in refused(path)
    monkeypatch.setattr(gguf_header, "ITEMS", Bound(40))
    assert "the number of items in its arrays is 4" in refused(path)


def test_factors_of_rope_are_counted_before_they_are_read(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    factors = np.ones(5000, np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    assert "values in rope_freqs.weight is 5000, but may be at most 4096" in refused(path)
