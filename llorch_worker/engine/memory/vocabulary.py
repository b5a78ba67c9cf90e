"""The memory that a process keeps for its vocabulary."""

from __future__ import annotations

from typing import Final

from llorch_worker.intake.constraints.compiler import LARGE_VOCABULARY
from llorch_worker.text.loading import VocabularySource

SENTENCEPIECE_BYTES: Final = 220
"""A token of Gemma 3 (262,144 of them) takes 215."""
TOKENIZERS_BYTES: Final = 850
"""A token takes 836 with Qwen 2.5 (151,936 of them), 817 with Gemma 3's tokenizer.json. The
library keeps each one's text and merge several times."""
GRAMMAR_BYTES: Final = 210
"""What llguidance keeps of a token: 217 with Gemma 3, 194 with Qwen 2.5."""


def vocabulary_bytes(checkpoint: VocabularySource, vocab_size: int) -> int:
    """Bytes of the tokenizer, and of the grammars' vocabulary if a worker prepares it.

    This is a plan; the constants are measured on real files by ``benches.memory_plan``.
    """
    if checkpoint.layout == "gguf":
        byte_level = checkpoint.metadata.get("tokenizer.ggml.model") == "gpt2"
    else:
        byte_level = (checkpoint.path / "tokenizer.json").is_file()
    each = TOKENIZERS_BYTES if byte_level else SENTENCEPIECE_BYTES
    return vocab_size * (each + (GRAMMAR_BYTES if vocab_size >= LARGE_VOCABULARY else 0))
