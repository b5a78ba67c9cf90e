"""How a text's vector is made of its tokens', as the model's files say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.bounds import repr_cut
from llorch_worker.model_files.side_file import exists, parse_object, read_object, read_text
from llorch_worker.weights import Checkpoint

PoolingKind = Literal["mean", "cls", "last"]

_GGUF_KINDS: Final[dict[int, PoolingKind]] = {1: "mean", 2: "cls", 3: "last"}
"""By ``<architecture>.pooling_type``. 0 is none, 4 is a reranker's head."""
_MODES: Final[dict[str, PoolingKind]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
"""sentence-transformers' switches. Its others (maximum, weighted mean) are refused by name."""
_FOLDER: Final = re.compile(r"[0-9]_\w+")
"""Where sentence-transformers keeps a module's own file."""


@dataclass(frozen=True)
class Pooling:
    """``mean`` of all tokens, or the first (``cls``) or ``last`` token alone."""

    kind: PoolingKind
    normalize: bool = True
    """Whether a vector has the length 1, unless a request says otherwise."""

    def vectors(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """``hidden: [tokens, width]`` of texts of these ``lengths``, one after the other, to
        float32 ``[texts, width]``. Not normalised."""
        counts = torch.tensor(lengths, device=hidden.device)
        ends = counts.cumsum(0)
        if self.kind == "last":
            return hidden[ends - 1].float()
        if self.kind == "cls":
            return hidden[ends - counts].float()
        return torch.segment_reduce(hidden.float(), "mean", lengths=counts)


def normalized(vectors: torch.Tensor) -> torch.Tensor:
    """Each row with the length 1."""
    return F.normalize(vectors, dim=-1)


def pooling_of(checkpoint: Checkpoint) -> Pooling | None:
    """The rule that the model's files give; None if they give none.

    Raises ModelLoadFailed for a rule that is not done here.
    """
    if checkpoint.layout == "gguf":
        return _of_gguf(checkpoint)
    if not exists(checkpoint.path / "modules.json"):
        return None
    return _of_modules(checkpoint.path)


def sizes_of(checkpoint: Checkpoint, width: int) -> tuple[int, ...]:
    """To how many numbers a vector may be cut, as a folder names them; empty: to any.

    Raises ModelLoadFailed if that are no numbers up to ``width``.
    """
    said = checkpoint.metadata.get("matryoshka_dimensions")
    if said is None:
        return ()
    if not isinstance(said, list) or not all(
        type(each) is int and 1 <= each <= width for each in said
    ):
        raise ModelLoadFailed(
            f"{checkpoint.path}: its matryoshka_dimensions are {repr_cut(said)}, but should be "
            f"numbers up to {width}; download the model again."
        )
    return tuple(said)


def _of_gguf(checkpoint: Checkpoint) -> Pooling | None:
    # GGUF does not say whether to normalise. llama.cpp does.
    architecture = checkpoint.metadata.get("general.architecture")
    kind = checkpoint.metadata.get(f"{architecture}.pooling_type")
    return Pooling(_GGUF_KINDS[kind]) if isinstance(kind, int) and kind in _GGUF_KINDS else None


def _of_modules(folder: Path) -> Pooling:
    """The pooling of a sentence-transformers folder."""
    kind: PoolingKind | None = None
    normalize = False
    for module in _modules(folder):
        name = str(module.get("type", "")).rpartition(".")[2]
        path = str(module.get("path", ""))
        match name:
            case "Transformer" if not path:
                pass
            case "Pooling" if _FOLDER.fullmatch(path):
                kind = _mode(folder / path / "config.json")
            case "Normalize":
                normalize = True
            case "Transformer" | "Pooling":
                # Another file would be in no download, no fingerprint, and perhaps in no model.
                raise ModelLoadFailed(
                    f"{folder}/modules.json has its {name} in {repr_cut(path)}; the Transformer "
                    "must be in the folder itself, and the Pooling in one such as 1_Pooling."
                )
            case _:
                raise ModelLoadFailed(
                    f"{folder}/modules.json has a module {repr_cut(name)}; only Transformer, "
                    "Pooling and Normalize are supported."
                )
    if kind is None:
        raise ModelLoadFailed(f"{folder}/modules.json has no Pooling; download the model again.")
    return Pooling(kind, normalize)


def _modules(folder: Path) -> list[Mapping[str, Any]]:
    # A list, where `read_object` wants an object.
    path = folder / "modules.json"
    try:
        modules = parse_object(f'{{"modules": {read_text(path)}}}')["modules"]
    except ValueError as error:
        raise ModelLoadFailed(f"{path} {error}; download the model again.") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelLoadFailed(f"{path} is no list of modules; download it again.")
    return modules


def _mode(file: Path) -> PoolingKind:
    config = read_object(file)
    # Newer files name the mode.
    named = config.get("pooling_mode")
    set_modes = [key for key, value in config.items() if key in _MODES and value is True]
    others = [
        key
        for key, value in config.items()
        if key.startswith("pooling_mode_") and key not in _MODES and value is True
    ]
    if named in ("mean", "cls", "lasttoken") and not others and not set_modes:
        return "last" if named == "lasttoken" else named
    if len(set_modes) == 1 and not others and named is None:
        return _MODES[set_modes[0]]
    said = named or ", ".join([*set_modes, *others]) or "none"
    raise ModelLoadFailed(
        f"{file}: its pooling is {repr_cut(said)}; one of {', '.join(_MODES)} is supported."
    )
