"""A GGUF Llama in transformers: as a model in float32, and as a folder that transformers writes.

Nothing here uses this package's own reader or model: tests compare both with the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def reference_model(path: Path) -> LlamaForCausalLM:
    """The file's weights, dequantised by ``gguf`` to float32."""
    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads = {"attn_q": field("attention.head_count"), "attn_k": field("attention.head_count_kv")}
    state = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *block, part, _ = tensor.name.split(".")
        if part in heads:
            # GGUF stores Q and K for RoPE on adjacent pairs.
            values = (
                values.reshape(heads[part], -1, 2, values.shape[-1])
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{NAMES[part]}.weight"] = torch.from_numpy(values.copy())
    tied = "lm_head.weight" not in state
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theta = reader.fields.get("llama.rope.freq_base")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=state["lm_head.weight"].shape[0],
            hidden_size=field("embedding_length"),
            intermediate_size=field("feed_forward_length"),
            num_hidden_layers=field("block_count"),
            num_attention_heads=heads["attn_q"],
            num_key_value_heads=heads["attn_k"],
            max_position_embeddings=field("context_length"),
            # Stored in float32, in which 1e-5 is another number.
            rms_norm_eps=float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4 if theta is None else theta.contents(),
            },
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )
    model.load_state_dict(state)
    return model.eval()


def write_folder(path: Path, folder: Path) -> None:
    """Write the model and the vocabulary, which must be of sentencepiece's kind, to ``folder``."""
    reference_model(path).save_pretrained(folder)
    fields = gguf.GGUFReader(path).fields
    pieces: list[str] = fields["tokenizer.ggml.tokens"].contents()
    scores: list[float] = fields["tokenizer.ggml.scores"].contents()
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = LlamaTokenizer(vocab=ids, merges=_merges(ids, scores), add_bos_token=True)
    tokenizer.save_pretrained(folder)


def _merges(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two; the best-scored piece comes first, as it is merged first."""
    splits = [
        (-scores[token_id], ids[piece[:at]], ids[piece[at:]])
        for piece, token_id in ids.items()
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    pieces = list(ids)
    return [(pieces[left], pieces[right]) for _, left, right in sorted(splits)]
