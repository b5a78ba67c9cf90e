"""The tokenizer of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llorch_worker.text.added_tokens import usable_ids
from llorch_worker.text.chat import chat_format
from llorch_worker.text.chat_templates import ChatTemplates, templates_in_gguf
from llorch_worker.text.control_tokens import FindAroundTurns, find_control_tokens
from llorch_worker.text.gguf_vocabulary import GgufVocabulary, adds_bos_by_default, is_encoder
from llorch_worker.text.tokenizer import Tokenizer, embedding_rows

_END_KEYS = ("eos", "eot", "eom")
"""GGUF names several tokens that end an answer, and old files only one of those they have."""
_NEEDED = ("bos", *_END_KEYS)
"""Those without which prompts and answers would be others."""
_TOKEN_KEYS = {
    name: (f"tokenizer.ggml.{key}_token_id", spelling)
    for name, key, spelling in (
        ("bos", "bos", "<s>"),
        ("eos", "eos", "</s>"),
        ("eot", "eot", None),
        ("eom", "eom", None),
        ("unk", "unknown", None),
        ("pad", "padding", None),
        ("sep", "seperator", None),  # GGUF's spelling
        ("cls", "cls", None),
        ("mask", "mask", None),
    )
}
"""transformers' name -> GGUF's key, and the token of the kind "llama" if the file names none."""


def tokenizer_of_gguf(metadata: Mapping[str, Any], find_around: FindAroundTurns) -> Tokenizer:
    """Raises ValueError if the vocabulary is missing, damaged or of an unknown kind."""
    vocabulary = GgufVocabulary(metadata)
    size = len(vocabulary.tokens)
    named: dict[str, int] = {}
    for name, (key, spelling) in _TOKEN_KEYS.items():
        token_id = metadata.get(key)
        if token_id is None and spelling is not None and vocabulary.kind == "llama":
            default = vocabulary.token_to_id(spelling)
            token_id = default if default is not None and vocabulary.is_control(default) else None
        for usable in usable_ids(key, token_id, size, needed=name in _NEEDED):
            named[name] = usable
    spellings = {f"{name}_token": vocabulary.tokens[i] for name, i in named.items()}
    templates = ChatTemplates(templates_in_gguf(metadata), spellings)
    control = find_control_tokens(vocabulary, find_around(templates), ids=named.values())
    ends = {named[name] for name in _END_KEYS if name in named}
    codec = vocabulary.with_control(control.spellings)
    ends |= control.ends(codec.special_ids)
    bos, eos = named.get("bos"), named.get("eos")
    encodes = is_encoder(metadata)
    if encodes:
        # Older files name the tokens around a text as BERT does alone.
        bos, eos = named.get("bos", named.get("cls")), named.get("eos", named.get("sep"))
        if bos is None or eos is None:
            raise ValueError(
                "an encoder's texts need tokenizer.ggml.bos_token_id and "
                "tokenizer.ggml.eos_token_id; convert the model again"
            )
    architecture = metadata.get("general.architecture", "llama")
    adds_bos = _adds(metadata, "bos", adds_bos_by_default(metadata))
    prefix = [bos] if adds_bos and bos is not None else []
    suffix = [eos] if _adds(metadata, "eos", encodes) and eos is not None else []
    between = list(suffix)
    if encodes and eos is not None and vocabulary.kind != "bert" and _adds(metadata, "sep", True):
        between.append(named.get("sep", eos))  # RoBERTa has two.
    return Tokenizer(
        codec,
        prefix_ids=prefix,
        suffix_ids=suffix,
        find_between=lambda: between,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=ends,
        # llama.cpp puts BOS before a chat whose template writes none.
        chat=chat_format(templates, codec, bos, eos, add_bos=bool(prefix)),
        model_vocab_size=embedding_rows(metadata.get(f"{architecture}.vocab_size"), size),
    )


def _adds(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """Whether the token is put around a text."""
    said = metadata.get(f"tokenizer.ggml.add_{name}_token")
    return default if said is None else bool(said)
