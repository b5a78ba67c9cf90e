"""Vocabularies from the metadata of a GGUF file.

Each kind imports its library when it is met: the other's would only take memory, up to 3 MiB.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from llorch_worker.model_files.bounds import TOKENS, check
from llorch_worker.text.added_tokens import AddedToken
from llorch_worker.text.codec import Codec
from llorch_worker.text.definition_check import check_charsmap, check_tokens
from llorch_worker.text.pre_tokenizers import PRE_TOKENIZERS
from llorch_worker.text.sentencepiece_model import SPACE, Piece, PieceKind, write_model

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_STRIPPING = "<|placeholder1|>"
"""A token of the one SentencePiece vocabulary whose control tokens take the white space after them.
Its tokenizer.json says so; GGUF cannot."""


class GgufVocabulary:
    """The tokens of a GGUF file and their kinds.

    Raises:
        ValueError: the vocabulary is missing, damaged or of an unknown kind.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.kind = metadata.get("tokenizer.ggml.model")
        if self.kind is None or not metadata.get("tokenizer.ggml.tokens"):
            raise ValueError("it holds no vocabulary (tokenizer.ggml.model, tokenizer.ggml.tokens)")
        kinds = ("bert", "gpt2", "llama", *(["t5"] if is_encoder(metadata) else []))
        if self.kind not in kinds:
            raise ValueError(
                f"unknown kind {str(self.kind)[:40]!r} of vocabulary; supported: {', '.join(kinds)}"
            )
        self._metadata = metadata
        check("tokenizer.ggml.tokens", len(metadata["tokenizer.ggml.tokens"]), TOKENS)
        self.tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
        check_tokens(self.tokens)
        try:
            self._kinds = [*map(PieceKind, metadata.get("tokenizer.ggml.token_type", ()))]
        except ValueError as error:
            raise ValueError(
                f"unknown token types in tokenizer.ggml.token_type ({error})"
            ) from error
        # Reversed, so that the first of equal tokens has the name.
        self._ids = {token: i for i, token in reversed([*enumerate(self.tokens)])}

    def token_to_id(self, token: str, /) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token_id: int, /) -> str | None:
        return self.tokens[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether the file itself says so."""
        return self._kinds[token_id : token_id + 1] == [PieceKind.CONTROL]

    def with_control(self, spellings: Collection[str]) -> Codec:
        """The vocabulary's codec, in which these tokens are control tokens too."""
        for spelling in spellings:
            token_id = self._ids[spelling]
            if token_id < len(self._kinds) and self._kinds[token_id] != PieceKind.UNKNOWN:
                self._kinds[token_id] = PieceKind.CONTROL
        if self.kind == "llama":
            return _sentencepiece_codec(self._metadata, self.tokens, self._kinds)
        from llorch_worker.text.tokenizers_codec import TokenizersCodec

        definitions = {
            "bert": _word_piece_definition,
            "gpt2": _byte_level_definition,
            "t5": _unigram_definition,
        }
        return TokenizersCodec(
            definitions[str(self.kind)](self._metadata, self.tokens, self._kinds)
        )


def is_encoder(metadata: Mapping[str, Any]) -> bool:
    """Whether the vocabulary is that of BERT's or RoBERTa's graph."""
    return metadata.get("general.architecture") == "bert"


def adds_bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """Whether BOS starts a text if tokenizer.ggml.add_bos_token is absent."""
    if is_encoder(metadata) or metadata["tokenizer.ggml.model"] in ("bert", "llama"):
        return True
    pre = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre")))
    return pre is not None and pre.adds_bos


def _sentencepiece_codec(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[PieceKind]
) -> Codec:
    from llorch_worker.text.sentencepiece_codec import SentencePieceCodec

    scores = _scores(metadata, tokens, kinds)
    pieces = [
        # Gemma's files hold runs of spaces as tokens to match whole. transformers merges them like
        # others, and first.
        Piece(SPACE * len(text), float(len(tokens) - i), PieceKind.NORMAL)
        if text.strip(" ") == "" and len(text) > 1
        else Piece(text, scores[i], kinds[i])
        for i, text in enumerate(tokens)
    ]
    model = write_model(
        pieces,
        add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
    )
    takes_spaces = any(piece.text == _STRIPPING for piece in pieces)
    added = {
        piece.text: AddedToken(piece.text, special=True, rstrip=True)
        for piece in pieces
        if takes_spaces
        and piece.kind == PieceKind.CONTROL
        and piece.text not in ("<s>", "<|endoftext|>")
    }
    return SentencePieceCodec(model, pieces, added=added)


def _scores(metadata: Mapping[str, Any], tokens: list[str], kinds: list[PieceKind]) -> list[float]:
    scores = [float(score) for score in metadata.get("tokenizer.ggml.scores", ())]
    if not len(tokens) == len(scores) == len(kinds):
        raise ValueError(f"{len(tokens)} pieces, {len(scores)} scores and {len(kinds)} types")
    return scores


def _unigram_definition(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[PieceKind]
) -> str:
    """The vocabulary as the content of a tokenizer.json, as transformers' XLMRobertaTokenizer makes
    it: whatever tokenizer.ggml.remove_extra_whitespaces says, it splits a text at white space. The
    converter may store ``clean_up_tokenization_spaces`` under that key, which concerns decoding.
    """
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    # The bytes may be signed.
    charsmap = bytes(each & 0xFF for each in metadata.get(_CHARSMAP, ()))
    if not charsmap:
        raise ValueError(f"its unigram vocabulary lacks {_CHARSMAP}; convert the model again")
    if metadata.get("tokenizer.ggml.add_space_prefix") is False:
        raise ValueError(
            "tokenizer.ggml.add_space_prefix is false, but an encoder's words begin with a space"
        )
    check_charsmap(charsmap)
    first = kinds.index(PieceKind.UNKNOWN) if PieceKind.UNKNOWN in kinds else None
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", first)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ValueError("its unigram vocabulary lacks tokenizer.ggml.unknown_token_id")
    pieces = []
    for token, score, kind in zip(tokens, _scores(metadata, tokens, kinds), kinds, strict=True):
        if kind in (PieceKind.UNUSED, PieceKind.BYTE):
            token = f" {token}"  # no word holds a space
        # transformers scores other pieces 0. The library scores an unknown character relative to
        # the lowest score, so -10,000 here would change ids.
        scored = kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED)
        pieces.append((token, score if scored else 0.0))
    try:
        tokenizer = RustTokenizer(models.Unigram(pieces, unknown))
        tokenizer.normalizer = normalizers.Precompiled(charsmap)
    except Exception as error:
        raise ValueError(f"its unigram vocabulary is damaged ({error})") from error
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(_control(tokens, kinds))
    return tokenizer.to_str()


def _word_piece_definition(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[PieceKind]
) -> str:
    """The vocabulary as the content of a tokenizer.json."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ValueError("its WordPiece vocabulary lacks tokenizer.ggml.unknown_token_id")
    vocabulary = {_word_piece(token): token_id for token_id, token in enumerate(tokens)}
    tokenizer = RustTokenizer(models.WordPiece(vocabulary, unk_token=tokens[unknown]))
    # Files of before this key are of models in lower case; llama.cpp knows no others.
    lowercase = metadata.get("tokenizer.ggml.normalizer.lowercase") is not False
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(_control(tokens, kinds))
    return tokenizer.to_str()


def _control(tokens: list[str], kinds: list[PieceKind]) -> list[Any]:
    from tokenizers import AddedToken

    return [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)
    ]


def _word_piece(token: str) -> str:
    """A token of GGUF as WordPiece has it: GGUF marks a word's first piece, and not the others."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def _byte_level_definition(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[PieceKind]
) -> str:
    """The vocabulary as the content of a tokenizer.json."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    from llorch_worker.text.tokenizers_codec import as_byte_level

    name = metadata.get("tokenizer.ggml.pre")
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None:
        raise ValueError(
            "tokenizer.ggml.pre is missing, which names the pre-tokenizer; convert the model "
            f"again, with one of: {known}"
        )
    if (pre := PRE_TOKENIZERS.get(str(name))) is None:
        raise ValueError(f"unknown pre-tokenizer {str(name)[:40]!r}; supported: {known}")
    halves = [str(merge).partition(" ") for merge in metadata.get("tokenizer.ggml.merges", ())]
    merges = [(left, right) for left, _, right in halves]
    malformed = any(not right or " " in right for _, right in merges)
    if len(kinds) != len(tokens) or not merges or malformed:
        raise ValueError("its byte-level vocabulary lacks well-formed merges or token types")
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary[as_byte_level(token, taken=vocabulary)] = token_id
    try:
        tokenizer = RustTokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.whole_words))
    except Exception as error:
        raise ValueError(f"its byte-level vocabulary is damaged ({error})") from error
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    words = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([*words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == PieceKind.CONTROL, normalized=False)
            for token, kind in zip(vocabulary, kinds, strict=True)
            if kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
        ]
    )
    definition: str = tokenizer.to_str()
    return definition
