"""How a decoder's files make vectors or scores of texts, in place of text of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine_options import PoolingChoice
from llorch_worker.model.encoder.config import GGUF_HEAD, RANK, refuse_prompts
from llorch_worker.model.encoder.pooling import Pooling, pooling_of
from llorch_worker.model_files.bounds import repr_cut
from llorch_worker.weights import Checkpoint

FOLDER_HEAD: Final = "score.weight"
"""[1, hidden], of transformers' sequence classification."""
HEADS: Final = (FOLDER_HEAD, GGUF_HEAD)
HEAD_ENDINGS: Final = ("ForSequenceClassification",)
_JUDGES: Final = ("qwen3",)
"""Architectures whose rerankers answer yes or no. Others ask in words of their own."""

HeadKind = Literal["folder", "gguf", "tokens"]


@dataclass(frozen=True)
class DecoderRule:
    """What is made of each text: a vector by ``pooling``, or a score by the ``head``."""

    pooling: Pooling | None = None
    head: HeadKind | None = None
    """Where its weights are. ``tokens``: in the output matrix, the rows of yes and no."""


def own_rule(checkpoint: Checkpoint) -> DecoderRule | None:
    """The rule of a decoder's own files; None if they give none: then it generates.

    Raises ModelLoadFailed for a rule that is not done here.
    """
    head = _own_head(checkpoint)
    if head is not None:
        _require_judge(checkpoint)
        return DecoderRule(head=head)
    if (pooling := pooling_of(checkpoint)) is None:
        return None
    refuse_prompts(checkpoint)
    return DecoderRule(pooling)


def rule_of(checkpoint: Checkpoint, asked: PoolingChoice | None) -> DecoderRule | None:
    """The rule of the files, else the one that is ``asked`` for."""
    if (own := own_rule(checkpoint)) is not None or asked is None:
        return own
    if asked == "rank":
        _require_judge(checkpoint)
        return DecoderRule(head="tokens")
    return DecoderRule(Pooling(asked))


def asks_as_qwen3(checkpoint: Checkpoint) -> bool:
    """Whether instructions and pairs are written as Qwen3-Embedding's and Qwen3-Reranker's cards
    say."""
    return _architecture(checkpoint) == "qwen3"


def _own_head(checkpoint: Checkpoint) -> HeadKind | None:
    metadata = checkpoint.metadata
    if checkpoint.layout == "gguf":
        ranks = metadata.get(f"{_architecture(checkpoint)}.pooling_type") == RANK
        if ranks and GGUF_HEAD not in checkpoint.tensors:
            raise ModelLoadFailed(
                f"{checkpoint.path} is a reranker without {GGUF_HEAD}; convert it with a llama.cpp "
                "that knows the family."
            )
        labels = metadata.get(f"{_architecture(checkpoint)}.classifier.output_labels")
        if ranks and labels not in (None, ["yes", "no"]):
            raise ModelLoadFailed(
                f"{checkpoint.path}: its labels are {repr_cut(labels)}; only yes and no are done."
            )
        return "gguf" if ranks else None
    if FOLDER_HEAD in checkpoint.tensors:
        return "folder"
    # vLLM's name for the words of the answer.
    words = metadata.get("classifier_from_token")
    if words is None:
        return None
    if words != ["no", "yes"]:
        raise ModelLoadFailed(
            f"{checkpoint.path}: its classifier_from_token is {repr_cut(words)}; only no and yes "
            "are done."
        )
    return "tokens"


def _require_judge(checkpoint: Checkpoint) -> None:
    if (name := _architecture(checkpoint)) not in _JUDGES:
        raise ModelLoadFailed(
            f"{checkpoint.path}: a reranker of the architecture {repr_cut(name)} is not done; "
            f"{', '.join(_JUDGES)} and bert are."
        )


def _architecture(checkpoint: Checkpoint) -> object:
    gguf = checkpoint.layout == "gguf"
    return checkpoint.metadata.get("general.architecture" if gguf else "model_type")
