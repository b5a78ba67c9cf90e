"""What an encoder's file says of its graph, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.encoder.pooling import Pooling, pooling_of
from llorch_worker.model.reader import Reader
from llorch_worker.model_files.bounds import repr_cut
from llorch_worker.model_files.side_file import exists, read_object
from llorch_worker.weights import Checkpoint

Activation = Literal["gelu", "gelu_tanh", "relu"]
FAMILY: Final = "bert"
ROBERTAS: Final = ("roberta", "xlm-roberta", "camembert")
"""``model_type`` of folders with BERT's graph whose positions begin behind the padding's."""
RANK: Final = 4
"""GGUF's ``pooling_type`` of a reranker."""
GGUF_HEAD: Final = "cls.output.weight"
"""Its last matrix."""

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_ENDINGS: Final = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""Of the architectures that hold such a graph. A language model's head goes unused."""


@dataclass(frozen=True)
class EncoderConfig:
    """BERT's graph: absolute positions, norms behind each sum, every token sees every other."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    token_types: int
    layer_norm_eps: float
    activation: Activation
    longest_text: int
    """The most tokens of a text, with those around it."""
    pooling: Pooling | None
    """None if the files name no rule."""
    labels: int = 0
    """Rows of a classifier's head; 0 for none."""
    squashes: bool = True
    """Whether a score is between 0 and 1: the head's number through a sigmoid."""
    first_position: int = 0
    """The row of a text's first token in the table of positions."""
    family: Literal["bert", "roberta"] = "bert"
    """Whose names a folder's tensors have."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether the file holds an encoder, and no model that generates."""
    key = "general.architecture" if checkpoint.layout == "gguf" else "model_type"
    named = checkpoint.metadata.get(key)
    return named == FAMILY or (checkpoint.layout != "gguf" and named in ROBERTAS)


def resolve_encoder(checkpoint: Checkpoint) -> EncoderConfig:
    """The configuration of a file or folder for which :func:`is_encoder` holds.

    Raises ModelLoadFailed, with the reason, for a graph that is not done here.
    """
    gguf = checkpoint.layout == "gguf"
    config = _from_gguf(checkpoint) if gguf else _from_hugging_face(checkpoint)
    if config.hidden_size % config.num_heads:
        raise ModelLoadFailed(
            f"{checkpoint.path}: {config.num_heads} heads do not divide its width of "
            f"{config.hidden_size}; download the model again."
        )
    return config


def _from_gguf(checkpoint: Checkpoint) -> EncoderConfig:
    read = Reader(checkpoint.path, checkpoint.metadata, f"{FAMILY}.")
    read.refuse_unless("attention.causal", (False,), "an encoder's tokens see each other")
    positions = read.integer("context_length")
    return EncoderConfig(
        vocab_size=_rows(checkpoint, "model.embed_tokens.weight"),
        hidden_size=read.integer("embedding_length"),
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=read.integer("block_count"),
        num_heads=read.integer("attention.head_count"),
        max_positions=positions,
        token_types=_rows(checkpoint, "token_types.weight"),
        layer_norm_eps=read.number("attention.layer_norm_epsilon"),
        # GGUF does not store the activation; BERT's is GELU.
        activation="gelu",
        longest_text=positions,
        pooling=pooling_of(checkpoint),
        # As of other rerankers: GGUF does not say what is made of the head's number.
        labels=_labels_of_gguf(checkpoint),
    )


def _from_hugging_face(checkpoint: Checkpoint) -> EncoderConfig:
    path, metadata = checkpoint.path, checkpoint.metadata
    read = Reader(path, metadata)
    named = metadata.get("architectures") or []
    for architecture in named if isinstance(named, list) else [named]:
        if not str(architecture).endswith(_ENDINGS):
            raise read.refused(f"its architecture is {architecture}", "no vector comes of its head")
    read.refuse_unless(
        "position_embedding_type", ("absolute",), "positions must be absolute in this family"
    )
    read.refuse_unless("is_decoder", (False,), "an encoder's tokens see each other")
    read.refuse_unless("hidden_act", tuple(_ACTIVATIONS), "the family has no other activation")
    refuse_prompts(checkpoint)
    positions = read.integer("max_position_embeddings")
    is_roberta = metadata["model_type"] in ROBERTAS
    first = 1 + read.integer("pad_token_id", 1) if is_roberta else 0
    longest = positions - first
    head = "classifier.out_proj.weight" if is_roberta else "classifier.weight"
    return EncoderConfig(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=read.integer("num_attention_heads"),
        max_positions=positions,
        token_types=read.integer("type_vocab_size", 2),
        layer_norm_eps=read.number("layer_norm_eps", 1e-12),
        activation=_ACTIVATIONS[metadata.get("hidden_act") or "gelu"],
        longest_text=min(longest, longest_of_folder(checkpoint) or longest),
        pooling=pooling_of(checkpoint),
        labels=_labels(checkpoint, head),
        squashes=_squashes(read, metadata),
        first_position=first,
        family="roberta" if is_roberta else "bert",
    )


def refuse_prompts(checkpoint: Checkpoint) -> None:
    """Raises ModelLoadFailed if sentence-transformers would put a text before each by itself."""
    file = checkpoint.path / "config_sentence_transformers.json"
    said: Mapping[str, Any] = read_object(file) if exists(file) else {}
    if (name := said.get("default_prompt_name")) is not None:
        raise ModelLoadFailed(
            f"{file} puts the prompt {repr_cut(name)} before each text; take default_prompt_name "
            "out, and send what the texts are for as a request's instruction."
        )


def longest_of_folder(checkpoint: Checkpoint) -> int | None:
    """The most tokens of a text that sentence-transformers takes; None if the files do not say."""
    file = checkpoint.path / "sentence_bert_config.json"
    said: Mapping[str, Any] = read_object(file) if exists(file) else {}
    if said.get("max_seq_length") is None:
        return None
    return Reader(file, said).integer("max_seq_length")


def _labels_of_gguf(checkpoint: Checkpoint) -> int:
    """Of a reranker, whether or not its file says that it is one."""
    says = checkpoint.metadata.get(f"{FAMILY}.pooling_type")
    if says != RANK and (says or GGUF_HEAD not in checkpoint.tensors):
        return 0
    for part in ("cls.weight", GGUF_HEAD):
        if part not in checkpoint.tensors:
            # llama.cpp's converter leaves out BERT's.
            raise ModelLoadFailed(
                f"{checkpoint.path} is a reranker without {part}, so scores would not be the "
                "model's; serve the folder that it was made of."
            )
    return _labels(checkpoint, GGUF_HEAD)


def _labels(checkpoint: Checkpoint, head: str) -> int:
    labels = _rows(checkpoint, head) if head in checkpoint.tensors else 0
    if labels > 1:
        raise ModelLoadFailed(
            f"{checkpoint.path} has a head of {labels} labels; one label scores a pair of texts."
        )
    return labels


def _squashes(read: Reader, metadata: Mapping[str, Any]) -> bool:
    """What sentence-transformers does with a head's number; newer files have it in an object."""
    said = metadata.get("sentence_transformers") or {}
    name = said.get("activation_fn") if isinstance(said, Mapping) else None
    name = name or metadata.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise read.refused(f"its scores pass through {kind}", "Sigmoid and Identity are done")
    return kind == "Sigmoid"


def _rows(checkpoint: Checkpoint, name: str) -> int:
    shape = checkpoint.require(name).shape
    return shape[0] if len(shape) > 1 else 1
