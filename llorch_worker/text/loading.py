"""Finds a checkpoint's vocabulary and chat template, and builds the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from llorch_worker.contract import InvalidRequest, ModelLoadFailed
from llorch_worker.model_files.bounds import repr_cut
from llorch_worker.text.control_tokens import FindAroundTurns, around_turns
from llorch_worker.text.folder_tokenizer import tokenizer_of_folder
from llorch_worker.text.gguf_tokenizer import tokenizer_of_gguf
from llorch_worker.text.tokenizer import Tokenizer

_MALFORMED = (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading settings of the wrong type raises."""


class VocabularySource(Protocol):
    """The part of ``weights.Checkpoint`` that the tokenizer needs."""

    @property
    def path(self) -> Path: ...

    @property
    def layout(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


def load_tokenizer(
    checkpoint: VocabularySource, find_around: FindAroundTurns = around_turns
) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a folder with tokenizer.json or tokenizer.model.

    ``find_around`` alone runs a chat template; the control tokens depend on it.

    Raises:
        ModelLoadFailed: the vocabulary is missing, damaged or of an unknown kind.
    """
    try:
        if checkpoint.layout == "gguf":
            return tokenizer_of_gguf(checkpoint.metadata, find_around)
        return tokenizer_of_folder(checkpoint.path, find_around)
    except (*_MALFORMED, ValueError, OSError, InvalidRequest) as error:
        match error:
            case ValueError() | OSError() | InvalidRequest():
                reason = str(error)
            case KeyError(args=[str(name)]):
                reason = f"its settings lack {repr_cut(name)}"
            case RecursionError():
                reason = "its settings nest too deep"
            case _:
                reason = "one of its settings is malformed, such as a text in the place of a list"
        raise ModelLoadFailed(
            f"The tokenizer of {checkpoint.path} cannot be used: {reason}."
        ) from error
