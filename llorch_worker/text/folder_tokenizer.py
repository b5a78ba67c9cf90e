"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llorch_worker.model_files.side_file import exists, read_bytes, read_object, read_text
from llorch_worker.text.added_tokens import AddedTokens, usable_ids
from llorch_worker.text.chat import chat_format
from llorch_worker.text.chat_templates import ChatTemplates, templates_in_folder
from llorch_worker.text.control_tokens import FindAroundTurns, find_control_tokens
from llorch_worker.text.tokenizer import Tokenizer, embedding_rows

if TYPE_CHECKING:
    from llorch_worker.text.sentencepiece_file import SentencePieceFile
    from llorch_worker.text.tokenizers_codec import TokenizersCodec


def tokenizer_of_folder(folder: Path, find_around: FindAroundTurns) -> Tokenizer:
    """Raises ValueError if the vocabulary is missing, damaged or of an unknown kind."""
    config = _object(folder / "config.json")
    generation = _object(folder / "generation_config.json")
    settings = _object(folder / "tokenizer_config.json")
    # Of sentence-transformers, for a vocabulary that keeps capitals, too.
    lowers = _object(folder / "sentence_bert_config.json").get("do_lower_case")
    if "added_tokens_decoder" not in settings:
        # Newer files have all in tokenizer_config.json.
        settings |= _object(folder / "special_tokens_map.json")
    added = AddedTokens(folder, settings)
    names = added.names
    file: TokenizersCodec | SentencePieceFile
    # One library is enough; see gguf_vocabulary.
    if exists(folder / "tokenizer.json"):
        from llorch_worker.text.tokenizers_codec import TokenizersCodec

        definition = read_text(folder / "tokenizer.json")
        file = TokenizersCodec(definition, added.by_id, [*added.without_id()])
        prefix, suffix = file.template_ids()
        between = file.pair_ids
        bos = eos = None
    elif exists(folder / "tokenizer.model"):
        file = _sentencepiece_file(folder, settings, added)
        bos, eos = file.bos_token_id, file.eos_token_id
        prefix, suffix, between = [] if bos is None else [bos], [], None
    else:
        raise ValueError("the folder has neither tokenizer.json nor tokenizer.model")

    def named(name: str, default: int | None) -> int | None:
        if name not in names:
            ids = ids_of(config, f"{name}_token_id", needed=name == "bos")
            return next(iter(ids), default)
        token_id = file.token_to_id(names[name])
        if token_id is None or (names[name] in file.appended and not added.declares(names[name])):
            raise ValueError(f"its {name}_token {names[name]!r} is not in the vocabulary")
        return token_id

    rows = embedding_rows(config.get("vocab_size"), file.size)

    def ids_of(source: Mapping[str, Any], field: str, *, needed: bool = False) -> list[int]:
        return usable_ids(field, source.get(field), rows, needed=needed)

    bos, eos = named("bos", bos), named("eos", eos)
    # Explicit settings override what the vocabulary's own file does.
    if isinstance(add_bos := settings.get("add_bos_token"), bool) and bos is not None:
        prefix = [bos] if add_bos else []
    if isinstance(add_eos := settings.get("add_eos_token"), bool) and eos is not None:
        suffix = [eos] if add_eos else []
    ends = set() if eos is None else {eos}
    for source in (config, generation):
        ends.update(ids_of(source, "eos_token_id"))
    pads = [
        token_id for source in (config, generation) for token_id in ids_of(source, "pad_token_id")
    ]
    spellings = {f"{name}_token": spelling for name, spelling in names.items()}
    for name, token_id in (("bos_token", bos), ("eos_token", eos)):
        spelling = None if token_id is None else file.id_to_token(token_id)
        spellings.setdefault(name, spelling or "")
    templates = ChatTemplates(templates_in_folder(folder, settings), spellings)
    control = find_control_tokens(
        file,
        find_around(templates),
        names=added.control,
        ids=[*ends, *pads],
    )
    codec = file.with_control(control.spellings)
    ends |= control.ends(codec.special_ids)
    return Tokenizer(
        codec,
        prefix_ids=prefix,
        suffix_ids=suffix,
        find_between=between,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=ends,
        chat=chat_format(templates, codec, bos, eos, add_bos=False),
        model_vocab_size=rows,
        lowers=bool(lowers),
    )


def _sentencepiece_file(
    folder: Path, settings: Mapping[str, Any], added: AddedTokens
) -> SentencePieceFile:
    from llorch_worker.text.sentencepiece_file import SentencePieceFile

    # Without the setting, transformers' own classes for Llama begin a text only once.
    llama = str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer")
    return SentencePieceFile(
        read_bytes(folder / "tokenizer.model"),
        added.by_id,
        more=added.without_id(),
        space_prefix=settings.get("add_prefix_space"),
        prefix_after_tokens=bool(settings.get("legacy", not llama)),
    )


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if exists(path) else {}
