"""No family's end of a turn becomes text, whatever its files say of it, and however little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers

from llorch_worker.text import Tokenizer, load_tokenizer


class Family(NamedTuple):
    name: str
    turn: str
    """What the template writes for a turn."""
    end: str
    """What ends a turn."""
    eos: str
    """What the files call EOS, which may be only the end of a document."""


LLAMA_3 = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
CHATML = "<|im_start|>{}\n{}<|im_end|>\n"
R1 = "<｜{}｜>{}<｜end▁of▁sentence｜>"
GRANITE = "<|start_of_role|>{}<|end_of_role|>{}<|end_of_text|>\n"
GEMMA = "<start_of_turn>{}\n{}<end_of_turn>\n"
FAMILIES = [
    Family("Llama 3", LLAMA_3, "<|eot_id|>", "<|end_of_text|>"),
    Family("Llama 3.1's tools", LLAMA_3, "<|eom_id|>", "<|eot_id|>"),
    Family("Mistral", "[{}]{}</s>", "</s>", "</s>"),
    Family("Qwen", CHATML, "<|im_end|>", "<|endoftext|>"),
    Family("Qwen's documents", CHATML, "<|endoftext|>", "<|im_end|>"),
    Family("R1 distilled", R1, "<｜end▁of▁sentence｜>", "<|endoftext|>"),
    Family("Phi", "<|{}|>\n{}<|end|>\n", "<|end|>", "<|endoftext|>"),
    Family("Granite", GRANITE, "<|end_of_text|>", "<|end_of_text|>"),
    Family("OLMo", "<|{}|>\n{}<|endoftext|>\n", "<|endoftext|>", "<|endoftext|>"),
    Family("Gemma", GEMMA, "<end_of_turn>", "<eos>"),
    Family("Gemma's documents", GEMMA, "<eos>", "<end_of_turn>"),
]


def template(family: Family) -> str:
    role, text = "{{ m.role }}", "{{ m.content }}"
    return f"{{% for m in messages %}}{family.turn.format(role, text)}{{% endfor %}}"


def check(tokenizer: Tokenizer, family: Family) -> None:
    (end,) = tokenizer.encode(family.end, False, parse_special=True)
    assert end in tokenizer.eos_token_ids
    assert tokenizer.decode([end]) == ""
    assert end not in tokenizer.encode(f"a{family.end}b")


@pytest.mark.parametrize("named", [None, "eos", "eot", "eom"])
@pytest.mark.parametrize("with_template", [True, False])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_answer_ends_with_its_turn_in_gguf(
    byte_level_metadata: dict[str, Any],
    source: Any,
    family: Family,
    named: str | None,
    with_template: bool,
) -> None:
    metadata = {**byte_level_metadata, "tokenizer.ggml.pre": "qwen2"}
    added = sorted({family.end, family.eos})
    tokens = [*metadata["tokenizer.ggml.tokens"], *added]
    # As text, as some converters have them, but for what may also be a tag of HTML.
    plain = family.end not in ("</s>", "<eos>")
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            *metadata["tokenizer.ggml.token_type"],
            *[1 if plain else 3] * len(added),
        ],
        "tokenizer.ggml.eos_token_id": tokens.index(family.eos),
    }
    if named is not None:
        metadata[f"tokenizer.ggml.{named}_token_id"] = tokens.index(family.end)
    if with_template:
        metadata["tokenizer.chat_template"] = template(family)
    check(load_tokenizer(source(Path("model.gguf"), "gguf", metadata)), family)


@pytest.mark.parametrize("says", ["generation_config", "config", "template", "nothing"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_answer_ends_with_its_turn_in_a_folder(
    trained_model: Path, tmp_path: Path, source: Any, family: Family, says: str
) -> None:
    library = tokenizers.Tokenizer.from_file(str(trained_model / "hf" / "tokenizer.json"))
    library.add_special_tokens([family.end, family.eos])
    library.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": family.eos}
    if says == "template":
        settings["chat_template"] = template(family)
    elif says != "nothing":
        ids = {"eos_token_id": [library.token_to_id(family.end)]}
        (tmp_path / f"{says}.json").write_text(json.dumps(ids))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    check(load_tokenizer(source(tmp_path)), family)
