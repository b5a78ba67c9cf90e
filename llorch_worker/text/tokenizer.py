"""One tokenizer for every vocabulary: text to ids and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from llorch_worker.contract import Message, Tool
from llorch_worker.text.chat import ChatFormat
from llorch_worker.text.chat_templates import ChatOptions
from llorch_worker.text.codec import Codec
from llorch_worker.text.detokenizer import IncrementalDetokenizer
from llorch_worker.text.dialects import Dialect
from llorch_worker.text.spellings import SURROGATE
from llorch_worker.text.thoughts import Tags, tags_of

_MAX_PADDING_TOKENS = 65_536
"""Models round their embedding up. A larger difference means another model's vocabulary."""
_LONGEST_TAG_CHARS = 32


def embedding_rows(model_tokens: object, vocab_size: int) -> int:
    """Rows of the embedding. Raises ValueError if the vocabulary is another model's."""
    if not isinstance(model_tokens, int):
        return vocab_size
    if model_tokens > vocab_size + _MAX_PADDING_TOKENS:
        raise ValueError(f"the model has {model_tokens} tokens, its vocabulary {vocab_size}")
    return model_tokens


class Tokenizer:
    """Text to token ids and back, as the model's own files define it. Thread-safe."""

    def __init__(
        self,
        codec: Codec,
        *,
        prefix_ids: Sequence[int],
        suffix_ids: Sequence[int],
        find_between: Callable[[], list[int]] | None = None,
        bos_token_id: int | None,
        eos_token_id: int | None = None,
        eos_token_ids: Collection[int],
        chat: ChatFormat,
        model_vocab_size: int = 0,
        lowers: bool = False,
    ) -> None:
        """``prefix_ids``, ``suffix_ids``: what ``add_special_tokens`` puts around a text.
        ``find_between``: finds what is between the two of a pair; None: what is behind a text.

        ``eos_token_id``: the one that the files call EOS; ``eos_token_ids``: all that end a text.

        ``model_vocab_size``: rows of the embedding, which may be padded beyond the vocabulary. A
        model may sample the padding's ids; they have no text.

        ``lowers``: whether :meth:`encode` reads a text in lower case.
        """
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decoding_table = codec.decoding_table.padded(model_vocab_size)
        self._codec = codec
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._find_between = find_between
        self._chat = chat
        self._lowers = lowers

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, or of the model's embedding if that is larger."""
        return len(self.decoding_table.token_bytes)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = False,
        *,
        at_most: int | None = None,
    ) -> list[int]:
        """Token ids of ``text``, with BOS where the model's files ask for it.

        Spellings of control tokens ("<s>") stay text unless ``parse_special``. A lone surrogate,
        which UTF-8 cannot encode, counts as U+FFFD.

        Raises:
            TooManyTokens: there are certainly more than ``at_most``. Found before it tokenises, so
                a text with a few more may pass.
        """
        if not text.isascii():
            text = SURROGATE.sub("\ufffd", text)
        if self._lowers and not parse_special:
            text = text.lower()
        if at_most is not None:
            self._codec.check_length(text, at_most)
        ids = self._codec.encode(text, parse_special)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    @property
    def around_text(self) -> tuple[list[int], list[int]]:
        """What ``add_special_tokens`` puts before a text and behind it."""
        return self._prefix_ids, self._suffix_ids

    @cached_property
    def between_texts(self) -> list[int]:
        """What is between the two texts of a pair. Raises ValueError if that are no tokens."""
        return self._suffix_ids if self._find_between is None else self._find_between()

    def has_control(self, text: str) -> bool:
        """Whether ``text`` has the spelling of a control token."""
        return any(spelling in text for spelling in self._codec.special_ids)

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of ``text`` in the middle of a longer text, without a space put in front."""
        before = self._codec.encode("\n")
        ids = self._codec.encode("\n" + text)
        return ids[len(before) :] if ids[: len(before)] == before else self._codec.encode(text)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        at_most: int | None = None,
        options: ChatOptions = ChatOptions(),  # noqa: B008 it is frozen
    ) -> list[int]:
        """Prompt ids of a conversation that the assistant is to answer, with ``tools`` to call.

        Raises:
            InvalidRequest: the model's chat format does not allow these turns, or no tools.
            TooManyTokens: see :meth:`encode`.
        """
        return self._chat.encode(messages, tools, at_most, options)

    @property
    def dialect(self) -> Dialect:
        """How the model writes calls of tools."""
        return self._chat.dialect

    def control_spellings(self, spellings: Iterable[str]) -> dict[int, str]:
        """Those of ``spellings`` that are control tokens, by their ids."""
        ids = self._codec.special_ids
        return {ids[spelling]: spelling for spelling in spellings if spelling in ids}

    def ends_below(self, vocab_size: int) -> frozenset[int]:
        """The tokens that end a text of a model with so many logits. A file may name others, which
        never do."""
        return frozenset(i for i in self.eos_token_ids if 0 <= i < vocab_size)

    def opens_thought(self, prompt_ids: Sequence[int], said: str = "") -> bool:
        """Whether this chat ends within a thought, but for ``said``, the beginning of the answer
        that the prompt ends with."""
        tags = self.thought_tags
        return tags is not None and self._before(prompt_ids, said).endswith(tags.opening)

    @property
    def thought_tags(self) -> Tags | None:
        """What stands around thoughts; None if the model's template knows none."""
        return tags_of(self._chat.template)

    def thought_opening(self, prompt_ids: Sequence[int], said: str = "") -> list[int]:
        """The tokens with which the answer to this chat may open a thought; none if it has none,
        or if the prompt has opened or ended it, or has ``said`` the beginning of the answer."""
        tags = self.thought_tags
        if tags is None or said.strip():
            return []
        if self._before(prompt_ids).endswith((tags.opening, tags.closing)):
            return []
        control = self._codec.special_ids.get(tags.opening)
        return self.encode_inside(tags.opening) if control is None else [control]

    def _before(self, prompt_ids: Sequence[int], said: str = "") -> str:
        """The end of a prompt before ``said``, without white space. Templates write tags, if at
        all, at the very end."""
        said = said.strip()
        # A character may take as many tokens as it has bytes.
        end = self.decode_whole(prompt_ids[-4 * (len(said) + _LONGEST_TAG_CHARS) :])
        return (end.rpartition(said)[0] if said else end).rstrip()

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence, without control tokens and the space that encoding added.

        Invalid UTF-8 becomes U+FFFD. Raises ValueError for an id out of range.
        """
        detokenizer = IncrementalDetokenizer(self, continuation=False)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def decode_whole(self, token_ids: Iterable[int]) -> str:
        """As :meth:`decode`, with the spellings of control tokens."""
        control = self.decoding_table.control
        detokenizer = IncrementalDetokenizer(self, continuation=False)
        parts = []
        for is_control, ids in groupby(token_ids, control.__contains__):
            if is_control:
                parts += [detokenizer.flush(), *(control[token_id] for token_id in ids)]
            else:
                parts.append(detokenizer.push(ids))
        return "".join(parts) + detokenizer.flush()

    def describe(self) -> dict[str, Any]:
        """What a tokenizer_config.json says, by its names, and the ids of BOS and of all ends."""
        control = self.decoding_table.control
        named = {
            "bos_token": control.get(-1 if self.bos_token_id is None else self.bos_token_id),
            "eos_token": control.get(-1 if self.eos_token_id is None else self.eos_token_id),
            "bos_token_id": self.bos_token_id,
            "chat_template": self._chat.template,
        }
        return {
            "tokenizer_class": self._codec.transformers_class,
            "vocab_size": self.vocab_size,
            "add_bos_token": bool(self._prefix_ids),
            "add_eos_token": bool(self._suffix_ids),
            "eos_token_ids": sorted(self.eos_token_ids),
            **{name: value for name, value in named.items() if value is not None},
        }

    def token_text(self, token_id: int) -> str:
        """One token for people to read: control tokens spelt out, incomplete UTF-8 as <0xE2>."""
        self.decoding_table.check(token_id)
        control = self.decoding_table.control.get(token_id)
        if control is not None:
            return control
        data = self.decoding_table.token_bytes[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    def text_and_bytes(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        """:meth:`token_text`, and the token's bytes if they are others. Rows of the model's output
        beyond the vocabulary have no text."""
        if token_id >= self.vocab_size:
            return "", None
        text = self.token_text(token_id)
        data = self.decoding_table.token_bytes[token_id]
        return text, None if data == text.encode() else tuple(data)
