"""``python -m benches.peers.conversions.hugging_face FILE.gguf FOLDER``: the file as a Hugging Face
folder, its weights dequantised to bfloat16."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benches.peers.contestants.contestant import Terms
from benches.peers.contestants.generate import load_model

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2


def convert(file: Path, folder: Path) -> None:
    """Write config, weights and a vocabulary whose tokens are named after their ids: converters
    ask for one, and nothing is tokenised."""
    terms = Terms(file, "bfloat16", threads=1, most_sequences=1, context_tokens=1, prefill_tokens=1)
    model = load_model(terms)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = BOS_ID, EOS_ID
    model.save_pretrained(folder)
    names = {f"<{token}>": token for token in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=f"<{UNK_ID}>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=f"<{UNK_ID}>",
        bos_token=f"<{BOS_ID}>",
        eos_token=f"<{EOS_ID}>",
    ).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
