"""Model files that were damaged at random, each with one seed, and how a load of one ends."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llorch_worker.contract import GenerationRequest, LlorchError, ModelLoadFailed
from llorch_worker.engine import Engine
from llorch_worker.model_files.gguf_header import read_gguf_header
from llorch_worker.model_files.model_file import ModelFile
from tests.made_models import DEMO

ANSWERS_WITHIN_S = 60
HUGE = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
WORDS = [
    b"1e400", b"-1", b"0", b"1.5", b"true", b"null", b"[]", b"{}", b'""', b'"\\ud800"', b"9" * 400,
    b"9" * 5000, b"[" * 3000, str(2**62).encode(), b"NaN", b"\xff",
]  # fmt: skip


def damage(data: bytes, random: Random, header: int, *, is_json: bool) -> bytes:
    """``data`` with a few faults, most of them in its first ``header`` bytes, which may be JSON."""
    found = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        end = header if random.random() < 0.85 else len(found)
        at = random.randrange(max(1, min(end, len(found))))
        match 6 if is_json and random.random() < 0.7 else random.randrange(6):
            case 0:
                found[at] ^= 1 << random.randrange(8)
            case 1:
                found[at : at + 4] = random.randbytes(4)
            case 2:
                found[at : at + 8] = random.choice(HUGE).to_bytes(8, "little")
            case 3:
                del found[at:]
            case 4:
                del found[at : at + random.randrange(1, 64)]
            case 5:
                other = random.randrange(max(1, min(end, len(found))))
                size = random.randrange(1, 64)
                found[at : at + size] = found[other : other + size]
            case 6:
                values = [*re.finditer(rb'(?<=[:\[, ])[-\w."]+(?=\s*[],}])', found[: header + 1])]
                if values:
                    value = random.choice(values)
                    found[value.start() : value.end()] = random.choice(WORDS)
        if not found:
            found = bytearray(b"\0")
    return bytes(found)


def damaged_model(seed: int, trained: Path, folder: Path) -> Path:
    """A model in ``folder``: one of the ``trained`` with one damaged file."""
    random = Random(seed)
    kind = random.choice(["demo", "q4_0", "f32", "safetensors", "safetensors", "config", "words"])
    if kind in ("demo", "q4_0", "f32"):
        source = DEMO if kind == "demo" else trained / f"{kind}.gguf"
        return _damaged_gguf(random, source, folder)
    return _damaged_folder(random, kind, trained / "hf", folder)


def damaged_family(seed: int, sources: list[Path], folder: Path) -> Path:
    """A model in ``folder``: one of ``sources``, in turn, with one damaged file."""
    random, source = Random(seed), sources[seed % len(sources)]
    if source.is_file():
        return _damaged_gguf(random, source, folder)
    return _damaged_folder(random, random.choice(["safetensors", "config"]), source, folder)


def _damaged_gguf(random: Random, source: Path, folder: Path) -> Path:
    file = folder / "model.gguf"
    header = read_gguf_header(ModelFile(source)).data_start
    # Most of a header is vocabulary.
    header = random.choice([header, 2_000])
    file.write_bytes(damage(source.read_bytes(), random, header, is_json=False))
    return file


def _damaged_folder(random: Random, kind: str, source: Path, folder: Path) -> Path:
    model = Path(shutil.copytree(source, folder / "hf"))
    names = {"safetensors": "model.safetensors", "config": "config.json"}
    file = model / names.get(kind, random.choice(["tokenizer.json", "tokenizer_config.json"]))
    data = file.read_bytes() if file.exists() else b"{}"
    header = 8 + int.from_bytes(data[:8], "little") if kind == "safetensors" else len(data)
    data = damage(data, random, header, is_json=True)
    if kind == "safetensors" and random.random() < 0.7:
        # A header of another length would be all that is seen.
        end = max(data.rfind(b"}}", 0, header + 20_000) + 2, 8)
        data = (end - 8).to_bytes(8, "little") + data[8:]
    file.write_bytes(data)
    return model


EXTREMES = [
    *HUGE, -1, 2, 10**30, 1e308, 1e-308, math.nan, math.inf, "x", "x" * 5000, "\ud800", "\0", True,
    None, [], {}, [math.inf], {"a": {}}, [[[]]], ["x"] * 70,
]  # fmt: skip


def damaged_value(seed: int, sources: list[Path], folder: Path) -> Path:
    """A model in ``folder``: a folder among ``sources`` in which one value of a JSON file is
    another."""
    random = Random(seed)
    source = random.choice([source for source in sources if source.is_dir()])
    model = Path(shutil.copytree(source, folder / "hf"))
    path = random.choice(sorted(model.glob("*config.json")) * 3 + [model / "tokenizer.json"])
    document = json.loads(path.read_text())
    inside, key = random.choice(list(_places(document)))
    inside[key] = random.choice(EXTREMES)
    path.write_text(json.dumps(document))
    return model


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value inside ``value``: what holds it, and under which key. Of many, the first three."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in islice(inner, 40 if isinstance(value, dict) else 3):
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)


def make_families(folder: Path) -> list[Path]:
    """A small random model of every family, as a folder and as a GGUF file."""
    from tests.model.gguf_of import write_gguf_of  # needs tools/ on the path
    from tests.model.test_families import FAMILIES, make_reference

    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(alphabet[:3])

    def add_vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(alphabet)
        writer.add_token_types([3] * 3 + [1] * (len(alphabet) - 3))
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    found = []
    for family in FAMILIES:
        reference = make_reference(family, vocab_size=len(alphabet))
        reference.save_pretrained(folder / family)
        tokenizer.save(str(folder / family / "tokenizer.json"))
        file = write_gguf_of(reference, folder / f"{family}.gguf", also=add_vocabulary)
        found += [folder / family, file]
    return found


def outcome(path: Path) -> str:
    """How a load, and a request after it, ends. Raises what is neither."""
    try:
        engine = Engine.load(path, device="cpu", max_sequences=2, kv_cache_bytes=2**24)
    except ModelLoadFailed as error:
        return error.code
    with engine:
        request = GenerationRequest(prompt="Once upon", max_tokens=4)
        try:
            engine.submit(request).result(timeout=ANSWERS_WITHIN_S)
        except LlorchError as error:
            return f"loaded, {error.code}"
        return "loaded"
