"""The vocabulary of a model's files, without torch and without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llorch_worker.model_files.hub import local_path
from llorch_worker.model_files.kind import is_folder
from llorch_worker.model_files.split_parts import split_parts


@dataclass(frozen=True)
class VocabularyFile:
    """What :func:`load_tokenizer` needs of a model."""

    path: Path
    layout: str
    metadata: Mapping[str, Any]


def open_vocabulary(path: Path) -> VocabularyFile:
    """The vocabulary of a .gguf file or a Hugging Face folder.

    Raises:
        ModelLoadFailed: there is no such file or folder, it cannot be read, or is not GGUF.
    """
    path = local_path(path, download=False)  # encoding alone is not worth gigabytes
    if is_folder(path):
        return VocabularyFile(path, "hugging_face", {})
    # numpy; whoever only encodes needs none.
    from llorch_worker.model_files.gguf_header import read_gguf_header
    from llorch_worker.model_files.model_file import ModelFile

    first, *_ = split_parts(path)
    return VocabularyFile(path, "gguf", read_gguf_header(ModelFile(first)).metadata)
