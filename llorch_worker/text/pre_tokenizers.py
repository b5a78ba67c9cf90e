"""How text is split before byte-level BPE, by the names of ``tokenizer.ggml.pre`` in GGUF files.

The patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# A word ends where a capital follows a small letter.
_CASED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SYMBOLS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA_3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN_2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_TEKKEN = rf"{_CASED_WORD}|{_CAPITALS}|\p{{N}}|{_SYMBOLS_OR_SLASH}|{_SPACES}"
_GPT_4O = (
    rf"{_CASED_WORD}{_CONTRACTION}?|{_CAPITALS}{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"|{_SYMBOLS_OR_SLASH}|{_SPACES}"
)
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """``patterns`` split text into words, each applied to what the one before left whole."""

    patterns: tuple[str, ...]
    composes: bool = False
    """Whether text is brought to Unicode's form C first."""
    whole_words: bool = False
    """Whether a word that is a token is never built from merges."""
    adds_bos: bool = False
    """Whether BOS starts a text if tokenizer.ggml.add_bos_token is absent."""


_DIGITS_THEN_GPT_2 = PreTokenizer((r"\p{N}", _GPT_2))
_OF_LLAMA_3 = PreTokenizer((_LLAMA_3,), whole_words=True, adds_bos=True)
_OF_QWEN_2 = PreTokenizer((_QWEN_2,), composes=True)

PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _OF_LLAMA_3),
    "smaug-bpe": PreTokenizer((_LLAMA_3,), whole_words=True),  # also SmolLM3
    "dbrx": PreTokenizer((_LLAMA_3,)),  # also Phi-4 and OLMo 2
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _OF_QWEN_2),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT_4O,))),  # also Phi-4-mini
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "roberta-bpe"), PreTokenizer((_GPT_2,))),
    # "refact" is also Granite's.
    **dict.fromkeys(("smollm", "refact", "starcoder", "minerva-7b"), _DIGITS_THEN_GPT_2),
}
