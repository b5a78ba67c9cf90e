"""A model file against transformers: templates, token ids, greedy tokens.

    pip install accelerate && python -m benches.real_files --model FILE.gguf [--texts 500]

transformers reads the same file in float32. Forty chats are compared: the rendered template, the
token ids, and each greedy token after the same tokens before it. Then the ids of texts in many
scripts, which hold the file's control tokens as people would write them. A file without a
chat template gets the last user's text as its prompt. Both models and their caches must fit into
memory: 11 GB for 500 million parameters.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gguf import GGUFReader
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from benches.command import main
from llorch_worker.contract import GenerationRequest, Message
from llorch_worker.engine import Engine
from llorch_worker.settings import Settings
from llorch_worker.text import Tokenizer
from tests.smollm2_chats import CHATS

TIE = 1e-3
"""Logits nearer than this are a tie: a float32 sum in another order differs by as much."""
PIECES = (
    *("the ", "Hello", " world", "don't", "I'VE", "naïve", "Straße", "12345", "3.14", "½", "٣"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u200b", "\u2028", "\ufeff", ""),
    *(
        "中国的首都",
        "日本で一番",
        "ひらがな",
        "カタカナ",
        "한국어",
        "ภาษาไทย",
        "العربية",
        "हिन्दी",
        "Россия",
        "Ελλάδα",
    ),
    *("🙂", "👩‍👩‍👧‍👦", "🇫🇷", "❤️‍🔥", "👍🏽", "e\u0301", "\ufb01", "𝕳𝖊", "𐍈", "\U000e0001"),
    *(
        "def f(x):\n    return x",
        "{'a': [1, 2]}",
        "<html>&amp;</html>",
        "SELECT *",
        "!!!???",
        "...",
        "_x__y",
    ),
    *(
        "x = 0x1F;",
        "https://a.b/c?d=e#f",
        "--flag",
        "\\n",
        "```",
        "$$",
        "%%",
        "^^",
        "@user",
        "#tag",
    ),
)


def real_files(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file.")],
    texts: Annotated[int, typer.Option("--texts", min=1)] = 500,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 16,
    seed: Annotated[int, typer.Option("--seed")] = 1,
) -> int:
    """Compare a file with transformers; exit code 1 if anything differs beyond a tie."""
    reference = _reference_tokenizer(model)
    settings = Settings(model=str(model), device="cpu", dtype="float32", max_context=2048)
    with Engine.load(model, settings.engine_options, kernels="torch") as engine:
        differing = _compare_texts(engine.tokenizer, reference, texts, random.Random(seed))
        prompts = [_prompt(chat, engine.tokenizer, reference) for chat in CHATS]
        differing += sum(not same for _, same in prompts)
        print(f"{len(CHATS)} prompts: ids of {sum(same for _, same in prompts)} equal")
        choices = _greedy(engine, [ids for ids, _ in prompts], new_tokens)
    network = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()
    return int(differing + _compare_greedy(network, choices) > 0)


def _reference_tokenizer(model: Path) -> Any:
    """transformers reads no tokenizer.ggml.pre; what it leaves out stands in the tokenizer.json."""
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    split = GGUFReader(model).fields.get("tokenizer.ggml.pre")
    name = split.contents() if split else None
    if name == "qwen2":
        tokenizer.backend_tokenizer.normalizer = NFC()
    elif name == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _compare_texts(tokenizer: Tokenizer, reference: Any, texts: int, chance: random.Random) -> int:
    """How many ids differ, of texts in which control tokens are but text."""
    pieces = (*PIECES, *reference.all_special_tokens)
    wrong = []
    for _ in range(texts):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 12)))
        theirs = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        if tokenizer.encode_inside(text) != theirs:
            wrong.append(text)
    print(f"{texts} texts: ids of {texts - len(wrong)} equal", *map(repr, wrong[:3]))
    return len(wrong)


def _prompt(
    chat: list[dict[str, Any]], tokenizer: Tokenizer, reference: Any
) -> tuple[list[int], bool]:
    """A chat's ids, and whether they are transformers'."""
    if not reference.chat_template:
        text = chat[-1]["content"]
        ids = tokenizer.encode(text)
        return ids, ids == reference.encode(text, split_special_tokens=True)
    ids = tokenizer.encode_chat([Message(**turn) for turn in chat])
    theirs = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    written = any(
        token in turn["content"] for token in reference.get_added_vocab() for turn in chat
    )
    # transformers lets people write control tokens; here they are text, so only the text is equal.
    same_ids = written or ids == reference.encode(theirs, add_special_tokens=False)
    # The ids' text is in Unicode's form C where the file's normaliser is.
    normalizer = reference.backend_tokenizer.normalizer
    theirs = normalizer.normalize_str(theirs) if isinstance(normalizer, NFC) else theirs
    return ids, reference.decode(ids) == theirs and same_ids


def _greedy(
    engine: Engine, prompts: list[list[int]], new_tokens: int
) -> list[tuple[list[int], list[int]]]:
    greedy = {"max_tokens": new_tokens, "temperature": 0}
    running = [
        (ids, engine.submit(GenerationRequest(prompt_token_ids=ids, **greedy)))
        for ids in prompts
        if ids
    ]
    return [(ids, list(each.result(600).choices[0].token_ids)) for ids, each in running]


def _compare_greedy(network: Any, choices: list[tuple[list[int], list[int]]]) -> int:
    equal = ties = wrong = 0
    for prompt, chosen in choices:
        with torch.inference_mode():
            # A token is the greedy one after the same tokens: one pass checks all.
            logits = network(
                torch.tensor([prompt + chosen]), logits_to_keep=len(chosen) + 1
            ).logits[0]
        rows = logits[: len(chosen)]
        behind = rows.amax(-1) - rows.gather(1, torch.tensor(chosen)[:, None])[:, 0]
        equal += int((behind == 0).sum())
        ties += int(((behind > 0) & (behind < TIE)).sum())
        wrong += int((behind >= TIE).sum())
    print(f"{equal + ties + wrong} greedy tokens: {equal} equal, {ties} ties, {wrong} differ")
    return wrong


if __name__ == "__main__":
    main(real_files, "real_files")
