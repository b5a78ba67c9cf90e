"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llorch_worker.text.chat import chat_format
from llorch_worker.text.chat_templates import ChatTemplates, templates_in_folder
from llorch_worker.text.control_tokens import find_control_tokens
from llorch_worker.text.tokenizer import Tokenizer, embedding_rows

if TYPE_CHECKING:
    from llorch_worker.text.sentencepiece_file import SentencePieceFile
    from llorch_worker.text.tokenizers_codec import TokenizersCodec

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Those that transformers knows by a name; its setting is ``bos_token`` and so on."""


def tokenizer_of_folder(folder: Path) -> Tokenizer:
    """Raises ValueError if the vocabulary is missing, damaged or of an unknown kind."""
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    settings = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        # Newer files have all in tokenizer_config.json.
        settings |= _json(folder / "special_tokens_map.json")
    names = {
        name: spelling
        for name in _NAMED_TOKENS
        if (spelling := _spelling(settings.get(f"{name}_token")))
    }
    file: TokenizersCodec | SentencePieceFile
    control_names = {*names.values(), *_special(settings)}
    # One library is enough; see gguf_vocabulary.
    if (folder / "tokenizer.json").is_file():
        from llorch_worker.text.tokenizers_codec import TokenizersCodec

        file = TokenizersCodec((folder / "tokenizer.json").read_text(encoding="utf-8"))
        prefix, suffix = file.template_ids()
        bos = eos = None
    elif (folder / "tokenizer.model").is_file():
        file = _sentencepiece_file(folder, settings, control_names)
        bos, eos = file.bos_token_id, file.eos_token_id
        prefix, suffix = [] if bos is None else [bos], []
    else:
        raise ValueError("the folder has neither tokenizer.json nor tokenizer.model")

    def named(name: str, default: int | None) -> int | None:
        if name not in names:
            return next(iter(_as_ids(config.get(f"{name}_token_id"))), default)
        if (token_id := file.token_to_id(names[name])) is None:
            raise ValueError(f"its {name}_token {names[name]!r} is not in the vocabulary")
        return token_id

    bos, eos = named("bos", bos), named("eos", eos)
    # Explicit settings override what the vocabulary's own file does.
    if isinstance(add_bos := settings.get("add_bos_token"), bool) and bos is not None:
        prefix = [bos] if add_bos else []
    if isinstance(add_eos := settings.get("add_eos_token"), bool) and eos is not None:
        suffix = [eos] if add_eos else []
    ends = set() if eos is None else {eos}
    for source in (config, generation):
        ends.update(_as_ids(source.get("eos_token_id")))
    spellings = {f"{name}_token": spelling for name, spelling in names.items()}
    for name, token_id in (("bos_token", bos), ("eos_token", eos)):
        spelling = None if token_id is None else file.id_to_token(token_id)
        spellings.setdefault(name, spelling or "")
    templates = ChatTemplates(templates_in_folder(folder, settings), spellings)
    control = find_control_tokens(
        file,
        templates,
        names=control_names,
        ids=[*ends, *_as_ids(config.get("pad_token_id")), *_as_ids(generation.get("pad_token_id"))],
    )
    codec = file.with_control(control.spellings)
    ends |= control.ends(codec.special_ids)
    return Tokenizer(
        codec,
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=ends,
        chat=chat_format(templates, codec, bos, eos, add_bos=False),
        model_vocab_size=embedding_rows(
            config.get("vocab_size"), len(codec.decoding_table.token_bytes)
        ),
    )


def _sentencepiece_file(
    folder: Path, settings: Mapping[str, Any], control_names: set[str]
) -> SentencePieceFile:
    from llorch_worker.text.sentencepiece_codec import AddedToken
    from llorch_worker.text.sentencepiece_file import SentencePieceFile

    added = {}
    for token_id, token in settings.get("added_tokens_decoder", {}).items():
        if token.get("single_word"):
            raise ValueError(f"its token {token['content']!r} is for single words only")
        added[int(token_id)] = AddedToken(
            token["content"],
            special=bool(token.get("special")) or token["content"] in control_names,
            lstrip=bool(token.get("lstrip")),
            rstrip=bool(token.get("rstrip")),
        )
    if "added_tokens_decoder" not in settings:
        for spelling, token_id in _json(folder / "added_tokens.json").items():
            added[int(token_id)] = AddedToken(spelling, special=spelling in control_names)
    # Without the setting, transformers' own classes for Llama begin a text only once.
    llama = str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer")
    return SentencePieceFile(
        (folder / "tokenizer.model").read_bytes(),
        added,
        space_prefix=settings.get("add_prefix_space"),
        prefix_after_tokens=bool(settings.get("legacy", not llama)),
    )


def _special(settings: Mapping[str, Any]) -> Iterator[str]:
    """Spellings of the tokens that the settings call special, besides the named ones."""
    for token in settings.get("added_tokens_decoder", {}).values():
        if token.get("special"):
            yield token["content"]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = settings.get(key) or []
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            if spelling := _spelling(token):
                yield spelling


def _spelling(token: object) -> str | None:
    spelling = token.get("content") if isinstance(token, dict) else token
    return spelling if isinstance(spelling, str) else None


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
