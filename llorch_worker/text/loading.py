"""Finds a checkpoint's vocabulary and chat template, and builds the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.text.chat import ChatFormat, Llama2Chat, TemplateChat
from llorch_worker.text.codec import Codec
from llorch_worker.text.gguf_vocabulary import adds_bos_by_default, codec_from_gguf
from llorch_worker.text.sentencepiece_model import Piece, PieceKind
from llorch_worker.text.tokenizer import Tokenizer

# GGUF names several tokens that end an answer, and old files only one of those they have.
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_OF_TURN_SPELLINGS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>")
_DEFAULT_SPELLINGS = {"bos_token_id": "<s>", "eos_token_id": "</s>"}
"""The ids of GGUF's kind "llama" when the file names none."""

_MAX_PADDING_TOKENS = 65_536
"""Models round their embedding up. A larger difference means another model's vocabulary."""


class VocabularySource(Protocol):
    """The part of ``weights.Checkpoint`` that the tokenizer needs."""

    @property
    def path(self) -> Path: ...

    @property
    def layout(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


def load_tokenizer(checkpoint: VocabularySource) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a folder with tokenizer.json or tokenizer.model.

    Raises:
        ModelLoadFailed: the vocabulary is missing, damaged or of an unknown kind.
    """
    try:
        if checkpoint.layout == "gguf":
            return _from_gguf(checkpoint.metadata)
        return _from_folder(checkpoint.path)
    except (ValueError, OSError, TypeError, LookupError, AttributeError) as error:
        # The last three mean settings of the wrong type.
        expected = isinstance(error, ValueError | OSError)
        reason = str(error) if expected else f"its settings are malformed ({error})"
        raise ModelLoadFailed(
            f"The tokenizer of {checkpoint.path} cannot be used: {reason}."
        ) from error


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    codec = codec_from_gguf(metadata)
    control = codec.special_ids
    vocab_size = len(codec.decoding_table.token_bytes)

    def named(name: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}")
        if token_id is None and metadata["tokenizer.ggml.model"] == "llama":
            token_id = control.get(_DEFAULT_SPELLINGS.get(name, ""))
        if token_id is None:
            return None
        if not 0 <= int(token_id) < vocab_size:
            raise ValueError(
                f"tokenizer.ggml.{name} is {token_id}, its vocabulary has {vocab_size} tokens"
            )
        return int(token_id)

    bos, eos = named("bos_token_id"), named("eos_token_id")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    add_bos = adds_bos_by_default(metadata) if add_bos is None else add_bos
    prefix = [bos] if add_bos and bos is not None else []
    add_eos = metadata.get("tokenizer.ggml.add_eos_token")
    ends = {token_id for name in _GGUF_END_KEYS if (token_id := named(name)) is not None}
    ends.update(control[spelling] for spelling in _END_OF_TURN_SPELLINGS if spelling in control)
    template = _template_of(metadata.get("tokenizer.chat_template"))
    return Tokenizer(
        codec,
        prefix_ids=prefix,
        suffix_ids=[eos] if add_eos and eos is not None else [],
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=ends,
        # llama.cpp puts BOS before a chat whose template writes none.
        chat=_chat_format(template, codec, bos, eos, add_bos=bool(prefix)),
        model_vocab_size=_model_vocab_size(metadata.get("llama.vocab_size"), vocab_size),
    )


def _from_folder(folder: Path) -> Tokenizer:
    config = _json(folder / "config.json")
    settings = _json(folder / "tokenizer_config.json")
    codec: Codec
    # One library is enough; see gguf_vocabulary.
    if (folder / "tokenizer.json").is_file():
        from llorch_worker.text.tokenizers_codec import TokenizersCodec

        codec = TokenizersCodec((folder / "tokenizer.json").read_text(encoding="utf-8"))
        prefix, suffix = codec.template_ids()
        bos = eos = None
    elif (folder / "tokenizer.model").is_file():
        from llorch_worker.text.sentencepiece_codec import SentencePieceCodec

        model = (folder / "tokenizer.model").read_bytes()
        codec = SentencePieceCodec.from_file(model, _added_pieces(settings))
        bos, eos = codec.bos_token_id, codec.eos_token_id
        prefix, suffix = [] if bos is None else [bos], []
    else:
        raise ValueError("the folder has neither tokenizer.json nor tokenizer.model")
    bos = _named_token(settings, "bos_token", codec, _first(config.get("bos_token_id"), bos))
    eos = _named_token(settings, "eos_token", codec, _first(config.get("eos_token_id"), eos))
    # Explicit settings override what the vocabulary's own file does.
    if isinstance(add_bos := settings.get("add_bos_token"), bool) and bos is not None:
        prefix = [bos] if add_bos else []
    if isinstance(add_eos := settings.get("add_eos_token"), bool) and eos is not None:
        suffix = [eos] if add_eos else []
    ends = set() if eos is None else {eos}
    for named in (config, _json(folder / "generation_config.json")):
        ends.update(_as_ids(named.get("eos_token_id")))
    vocab_size = len(codec.decoding_table.token_bytes)
    return Tokenizer(
        codec,
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=ends,
        chat=_chat_format(_folder_template(folder, settings), codec, bos, eos, add_bos=False),
        model_vocab_size=_model_vocab_size(config.get("vocab_size"), vocab_size),
    )


def _model_vocab_size(model_tokens: object, vocab_size: int) -> int:
    if not isinstance(model_tokens, int):
        return vocab_size
    if model_tokens > vocab_size + _MAX_PADDING_TOKENS:
        raise ValueError(f"the model has {model_tokens} tokens, its vocabulary {vocab_size}")
    return model_tokens


def _chat_format(
    template: str | None, codec: Codec, bos: int | None, eos: int | None, *, add_bos: bool
) -> ChatFormat:
    if template is None:
        return Llama2Chat(codec, bos, eos)
    control = codec.decoding_table.control
    spellings = {
        name: "" if token_id is None else control.get(token_id, "")
        for name, token_id in (("bos_token", bos), ("eos_token", eos))
    }
    return TemplateChat(template, codec, spellings, bos if add_bos else None)


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return _template_of(settings.get("chat_template"))


def _template_of(value: object) -> str | None:
    """The template in a setting: a string, or the default of several named ones."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) and value else None


def _added_pieces(settings: Mapping[str, Any]) -> dict[int, Piece]:
    return {
        int(token_id): Piece(
            token["content"],
            0.0,
            PieceKind.CONTROL if token.get("special") else PieceKind.USER_DEFINED,
        )
        for token_id, token in settings.get("added_tokens_decoder", {}).items()
    }


def _named_token(
    settings: Mapping[str, Any], name: str, codec: Codec, default: int | None
) -> int | None:
    token = settings.get(name)
    spelling = token.get("content") if isinstance(token, dict) else token
    return codec.special_ids.get(spelling, default) if isinstance(spelling, str) else default


def _first(value: object, default: int | None) -> int | None:
    return next(iter(_as_ids(value)), default)


def _as_ids(value: object) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    return [token_id for token_id in ids if isinstance(token_id, int)]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return content
