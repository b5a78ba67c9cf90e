"""Tokens that the settings of a folder add to its vocabulary, and those that they name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from llorch_worker.model_files.bounds import TOKEN_BYTES, TOKENS, check, repr_cut
from llorch_worker.model_files.side_file import exists, read_object

logger = logging.getLogger(__name__)

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Those that transformers knows by a name, in the order in which it adds them; the setting is
``bos_token`` and so on."""
_NONE = (-1, 2**32 - 1)
"""Ids that stand for no token: 2 ** 32 - 1 is -1 where a file has unsigned numbers."""


@dataclass(frozen=True)
class AddedToken:
    """A token that a folder adds to its vocabulary, or whose properties it changes."""

    text: str
    special: bool
    lstrip: bool = False
    """Whether the token takes the white space before it."""
    rstrip: bool = False
    normalized: bool = False
    """Whether it is found in the text that the vocabulary's normalizer has made."""
    single_word: bool = False


class AddedTokens:
    """The tokens in tokenizer_config.json, special_tokens_map.json and added_tokens.json.

    Read as transformers does: the map and added_tokens.json count where tokenizer_config.json has
    no ``added_tokens_decoder``. Raises ValueError for malformed settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """``settings``: of tokenizer_config.json, with those of special_tokens_map.json."""
        self.names = {
            name: spelling
            for name in _NAMED
            if (spelling := _spelling(settings.get(f"{name}_token")))
        }
        """Spellings by transformers' names, such as ``eos``."""
        extra = settings.get("extra_special_tokens")
        self._extra = [*_listed("extra_special_tokens", extra)]
        older = settings.get("additional_special_tokens")
        additional = [*_listed("additional_special_tokens", older)]
        # The newer setting goes before the older, unless it gives names to its tokens.
        if not extra or isinstance(extra, dict):
            self._extra += additional
        # Such as `image_token`.
        self._extra += [
            AddedToken(value, special=True)
            for key, value in settings.items()
            if key.endswith("_token") and isinstance(value, str) and key[:-6] not in _NAMED
        ]
        decoder = settings.get("added_tokens_decoder")
        self.control = {
            *self.names.values(),
            *(token.text for token in (*self._extra, *additional)),
        }
        """Spellings of the tokens that the settings call special."""
        self.by_id: dict[int, AddedToken] = {}
        """Those that have an id in the settings."""
        if decoder is not None:
            self.control.update(
                token["content"] for token in decoder.values() if token.get("special")
            )
            for key, token in decoder.items():
                self._put("added_tokens_decoder", int(key), _token(token, self.control))
        elif exists(folder / "added_tokens.json"):
            for spelling, token_id in read_object(folder / "added_tokens.json").items():
                special = spelling in self.control
                added = AddedToken(spelling, special, normalized=not special)
                self._put("added_tokens.json", token_id, added)

    def _put(self, field: str, token_id: object, token: AddedToken) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ValueError(f"{field} has the id {repr_cut(token_id)}, which is no token id")
        check(f"an id in {field}", token_id, TOKENS)
        check(f"the length of a token in {field}", len(token.text.encode()), TOKEN_BYTES)
        self.by_id[token_id] = token

    def without_id(self) -> Iterator[AddedToken]:
        """Those that only have a name or are listed, in the order in which transformers adds
        them behind the others."""
        seen = {token.text for token in self.by_id.values()}
        named = (AddedToken(spelling, special=True) for spelling in self.names.values())
        for token in (*named, *self._extra):
            if token.text not in seen:
                seen.add(token.text)
                check("the length of a special token", len(token.text.encode()), TOKEN_BYTES)
                yield token

    def declares(self, spelling: str) -> bool:
        """Whether the settings say more of a token than that it is the end, or the beginning."""
        given = (*self.by_id.values(), *self._extra)
        return any(token.text == spelling for token in given)


def _listed(field: str, tokens: object) -> Iterator[AddedToken]:
    """Of a list, or an object by name."""
    if not isinstance(tokens, list | dict | NoneType):
        raise ValueError(f"{field} is {repr_cut(tokens)}, but must be a list of tokens")
    for token in tokens.values() if isinstance(tokens, dict) else tokens or ():
        if isinstance(token, dict):
            yield _token(token, {token["content"]})
        elif isinstance(token, str):
            yield AddedToken(token, special=True)
        else:
            raise ValueError(f"{field} has {repr_cut(token)}, which is no token")


def _token(token: Mapping[str, Any], control: set[str]) -> AddedToken:
    text = token["content"]
    if not isinstance(text, str):
        raise TypeError(f"a token's content is {repr_cut(text)}")
    special = bool(token.get("special")) or text in control
    return AddedToken(
        text,
        special,
        lstrip=bool(token.get("lstrip")),
        rstrip=bool(token.get("rstrip")),
        normalized=bool(token.get("normalized", not special)),
        single_word=bool(token.get("single_word")),
    )


def _spelling(token: object) -> str | None:
    spelling = token.get("content") if isinstance(token, dict) else token
    return spelling if isinstance(spelling, str) else None


def usable_ids(field: str, value: object, rows: int, *, needed: bool = False) -> list[int]:
    """The ids in a setting: none, one or a list. Those that are none of the model's tokens are
    named in the log.

    ``rows``: of the embedding. ``needed``: prompts or answers would be others without the token.
    Raises ValueError for a needed one that the model lacks, and for what is no id.
    """
    ids, unknown = [], []
    for token_id in value if isinstance(value, list) else [value]:
        if token_id is None:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"{field} is {repr_cut(token_id)}, which is no token id")
        if 0 <= token_id < rows:
            ids.append(token_id)
        elif needed and token_id not in _NONE:
            raise ValueError(f"{field} is {repr_cut(token_id)}, the model has {rows} tokens")
        else:
            unknown.append(token_id)
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        what = "%s is %s%s, which is none of the model's %d tokens; it counts as none"
        logger.warning(what, field, repr_cut(unknown[0]), more, rows)
    return ids
