"""A real chat model: 40 chats are rendered and tokenised as transformers does. One in 14, or all
with ``LLORCH_FULL_SIZE=1``, is answered through the queue and over HTTP as it answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest, GenerationResult
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary
from tests.gateways import running_gateway
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker
from tests.sizes import sized
from tests.smollm2_chats import CHATS

ANSWERED = sized(usual=CHATS[9::14], full=CHATS)
NEW_TOKENS = 16
START, END = 1, 2
"""The ids of ``<|im_start|>`` and ``<|im_end|>``."""
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def reference_tokenizer(smollm2: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    # transformers does not read tokenizer.ggml.pre. This is what the model's tokenizer.json has.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_vocabulary(smollm2))


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> LlamaForCausalLM:
    """transformers' model in float32, from the file's blocks, dequantised by the package gguf."""
    reader = gguf.GGUFReader(smollm2)
    read = {tensor.name: tensor for tensor in reader.tensors}

    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")

    def weight(name: str) -> torch.Tensor:
        tensor = read[f"{name}.weight"]
        return torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))

    def half_split(matrix: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows for half-split RoPE from rows for interleaved RoPE."""
        rows, columns = matrix.shape
        return matrix.view(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)

    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    embedding = weight("token_embd")
    state = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": weight("output_norm"),
    }
    for layer in range(number("block_count")):
        for theirs, ours in names.items():
            matrix = weight(f"blk.{layer}.{ours}")
            if ours in ("attn_q", "attn_k"):
                matrix = half_split(matrix, heads if ours == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{theirs}.weight"] = matrix
    config = LlamaConfig(
        vocab_size=len(embedding),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base"),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture(scope="module")
def worker(
    smollm2: Path, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("smollm2")
    options = {"app": REAL_APP, "model": smollm2, "model_name": "chat", "dtype": "float32"}
    with running_worker(redis_server.url, folder, max_context=2048, **options) as worker:
        yield worker


@pytest.fixture(scope="module")
def answers(worker: WorkerProcess, client: Client) -> list[GenerationResult]:
    """Those of the chats, which were in the queue together."""
    jobs = [
        client.submit(model="chat", messages=chat, max_tokens=NEW_TOKENS, temperature=0)
        for chat in ANSWERED
    ]
    return [job.result(120) for job in jobs]


def prompt_ids(chat: list[dict[str, Any]], reference_tokenizer: Any) -> list[int]:
    """The chat in ChatML by transformers' tokenizer. Only the template writes control tokens: what
    people write is text."""

    def literal(text: str) -> list[int]:
        ids: list[int] = reference_tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids

    if chat[0]["role"] != "system":
        chat = [{"role": "system", "content": DEFAULT_SYSTEM}, *chat]
    turns = [literal(f"{turn['role']}\n{turn['content']}") for turn in chat]
    new_line = literal("\n")
    ids = [token for turn in turns for token in (START, *turn, END, *new_line)]
    return [*ids, START, *literal("assistant\n")]


def test_every_chat_is_rendered_and_tokenised_as_transformers_does(
    tokenizer: Tokenizer, reference_tokenizer: Any
) -> None:
    ending_turns = []
    for chat in CHATS:
        ids = tokenizer.encode_chat(GenerationRequest(messages=chat).messages)
        theirs = reference_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        assert reference_tokenizer.decode(ids) == theirs, chat
        assert ids == prompt_ids(chat, reference_tokenizer), chat
        if reference_tokenizer.encode(theirs, add_special_tokens=False) != ids:
            ending_turns.append(chat)
    # transformers lets people write control tokens, such as the end of their turn.
    assert len(ending_turns) == 7
    assert all("<" in str(chat) for chat in ending_turns)


def test_greedy_tokens_through_the_queue_are_those_of_transformers(
    answers: list[GenerationResult], reference: LlamaForCausalLM, reference_tokenizer: Any
) -> None:
    for chat, answer in zip(ANSWERED, answers, strict=True):
        prompt = prompt_ids(chat, reference_tokenizer)
        assert answer.usage.prompt == len(prompt)
        choice = answer.choices[0]
        chosen = list(choice.token_ids)
        ids = torch.tensor([prompt + chosen])
        with torch.inference_mode():
            # A token is the greedy one after the same tokens: one pass checks all.
            logits = reference(ids, logits_to_keep=len(chosen) + 1).logits[0]
        greedy = logits.argmax(-1).tolist()
        if choice.finish_reason == "stop" and END not in chosen:
            chosen.append(END)
        assert chosen == greedy[: len(chosen)], chat


def test_over_http_the_answers_are_the_same(
    answers: list[GenerationResult], redis_server: RedisServer, tmp_path: Path
) -> None:
    with (
        running_gateway(redis_server.url, tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=120) as http,
        ThreadPoolExecutor(len(ANSWERED)) as threads,
    ):

        def ask(chat: list[dict[str, Any]]) -> Any:
            body = {"model": "chat", "messages": chat, "max_tokens": 8, "temperature": 0}
            return http.post("/v1/chat/completions", json=body).raise_for_status().json()

        given = [each["choices"][0] for each in threads.map(ask, ANSWERED)]
    for choice, answer in zip(given, answers, strict=True):
        # The last character may lack bytes of tokens that this one was not given.
        assert answer.text.startswith(choice["message"]["content"].rstrip("\ufffd"))
    assert sum(bool(choice["message"]["content"]) for choice in given) > 0.85 * len(given)
