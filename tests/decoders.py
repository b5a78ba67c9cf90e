"""Random Qwen 3 models for vectors and scores, with a small vocabulary: folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from tests.model.gguf_of import write_gguf_of
from tests.model.test_encoder import write_modules

END = "<|endoftext|>"
CONTROL = (END, "<|im_start|>", "<|im_end|>", "<think>", "</think>")
MERGES = [("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "w"), ("i", "n"), ("t", "h"), ("e", "r")]
TOKENS = [
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(f"{one}{two}" for one, two in MERGES),
    *CONTROL,
]
CONTEXT, WIDTH = 512, 64


def random_qwen(kind: type[Any] = Qwen3Model, **options: Any) -> Any:
    torch.manual_seed(5)
    shape = {
        "vocab_size": len(TOKENS), "hidden_size": WIDTH, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 96, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
        "pad_token_id": TOKENS.index(END),
    }  # fmt: skip
    model = kind(Qwen3Config(**(shape | options))).eval()
    for parameter in model.parameters():
        # Its own start has norms of 1, and states that hardly differ.
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    return model


def write_vocabulary(folder: Path, *, ends: bool = True) -> None:
    """``ends``: whether a text's last token is the end of texts, as of Qwen3-Embedding."""
    vocabulary = {token: at for at, token in enumerate(TOKENS)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*CONTROL[:3]])
    made.add_tokens([*CONTROL[3:]])
    if ends:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", pair=f"$A {END} $B:1 {END}:1",
            special_tokens=[(END, TOKENS.index(END))],
        )  # fmt: skip
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": END})
    )


def write_embedder(folder: Path, kind: type[Any] = Qwen3Model, **options: Any) -> Path:
    """A folder of sentence-transformers. ``kind``: with or without a language model's head."""
    random_qwen(kind, **options).save_pretrained(folder)
    write_modules(folder, {"pooling_mode_lasttoken": True, "include_prompt": True}, "Normalize")
    write_vocabulary(folder)
    return folder


def write_judge(folder: Path, *, tied: bool = True, marked: bool = True) -> Path:
    """A reranker that says yes or no. ``marked``: whether its files say so."""
    random_qwen(Qwen3ForCausalLM, tie_word_embeddings=tied).save_pretrained(folder)
    write_vocabulary(folder, ends=False)
    if marked:
        file = folder / "config.json"
        said = {"classifier_from_token": ["no", "yes"]}
        file.write_text(json.dumps(json.loads(file.read_text()) | said))
    return folder


def write_classifier(folder: Path) -> Path:
    """The same with a head of its own."""
    random_qwen(Qwen3ForSequenceClassification, num_labels=1).save_pretrained(folder)
    write_vocabulary(folder, ends=False)
    return folder


def write_gguf(model: Any, path: Path, pooling_type: int, *, ends: bool = True) -> Path:
    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(TOKENS)
        kinds = [gguf.TokenType.NORMAL] * (len(TOKENS) - len(CONTROL))
        marks = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.USER_DEFINED] * 2
        writer.add_token_types([*kinds, *marks])
        writer.add_token_merges([f"{one} {two}" for one, two in MERGES])
        writer.add_eos_token_id(TOKENS.index(END))
        writer.add_add_eos_token(ends)
        writer.add_pooling_type(gguf.PoolingType(pooling_type))
        if pooling_type == gguf.PoolingType.RANK:
            writer.add_classifier_output_labels(["yes", "no"])
            answers = [TOKENS.index("yes"), TOKENS.index("no")]
            head = model.get_output_embeddings().weight[answers].detach().numpy()
            writer.add_tensor("cls.output.weight", head)

    return write_gguf_of(model, path, also=also)
