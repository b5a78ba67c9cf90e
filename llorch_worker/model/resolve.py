"""Resolves a checkpoint's metadata into a ModelConfig: reads loosely, then checks strictly."""

from __future__ import annotations

from dataclasses import replace

from llorch_worker.cache.rope_tables import inverse_frequencies
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.config import Graph, ModelConfig
from llorch_worker.model.encoder.config import is_encoder
from llorch_worker.model.encoder.decoder_rule import HEAD_ENDINGS, HEADS
from llorch_worker.model.families import BY_GGUF, BY_MODEL_TYPE, BY_NAME, FAMILIES, Family
from llorch_worker.model.families.family import sliding_layers
from llorch_worker.model.reader import Reader
from llorch_worker.model.ropes import contexts, gguf_rope, hugging_face_rope
from llorch_worker.model.weight_table import EMBEDDING, OUTPUT, check_tensors
from llorch_worker.weights import Checkpoint

_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
_SCALES = ("logit_scale", "residual_scale", "embedding_scale", "attention.scale")


def resolve_config(checkpoint: Checkpoint, *, generates: bool = True) -> ModelConfig:
    """The configuration of a model file. ``generates``: whether its output matrix is needed; else
    vectors or scores are made of what this would read, and a head may stand in its place.

    Raises ModelLoadFailed, with the reason, for any model whose graph is not one of ``families``.
    """
    gguf = checkpoint.layout == "gguf"
    endings = ("ForCausalLM",) if generates else ("ForCausalLM", "Model", *HEAD_ENDINGS)
    config = _from_gguf(checkpoint) if gguf else _from_hugging_face(checkpoint, endings)
    if not generates:
        # The embedding stands in for the matrix, and takes no memory where it may be shared.
        tied = config.tie_word_embeddings or OUTPUT not in checkpoint.tensors
        config = replace(config, tie_word_embeddings=tied)
    _check(config, checkpoint, beside=() if generates else HEADS)
    return config


def _family(checkpoint: Checkpoint, key: str, known: dict[str, Family]) -> Family:
    name = checkpoint.metadata.get(key)
    if isinstance(name, str) and name in known:
        return known[name]
    if is_encoder(checkpoint):
        raise ModelLoadFailed(
            f"{checkpoint.path} holds an encoder, which generates no text; serve it with `llorch "
            "worker`, and send it texts for vectors or scores."
        )
    raise ModelLoadFailed(
        f"{checkpoint.path}: its {key} is {str(name)[:50]!r}, which is none of the supported "
        f"families ({', '.join(family.name for family in FAMILIES)}); serve one of them."
    )


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    path, metadata = checkpoint.path, checkpoint.metadata
    family = _family(checkpoint, "general.architecture", BY_GGUF)
    read = Reader(path, metadata, f"{family.gguf}.")
    read.refuse_unless("expert_count", (0,), "mixtures of experts are not supported")
    read.refuse_unless("attention.causal", (True,), "only causal models can generate")
    for key in _SCALES:
        if key not in family.scales:
            read.refuse_unless(key, (0.0, 1.0), f"{family.name} has no such scaling")
    if EMBEDDING not in checkpoint.tensors:
        raise ModelLoadFailed(
            f"{path} holds no weights (a vocabulary only?); give the file of a whole model."
        )
    heads = read.integer("attention.head_count")
    hidden = read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", max(1, hidden // heads))
    read.refuse_unless("attention.value_length", (head_dim,), "keys and values must have one size")
    layers = _layers(read, "block_count", checkpoint)
    rope = gguf_rope(checkpoint, read, head_dim)
    context, longest = contexts(read, "context_length", rope.scaling)
    graph = family.from_gguf(read)
    graph = _windowed(read, graph, layers, longest, "attention.sliding_window")
    return ModelConfig(
        # From the embedding: some files give a vocabulary size without its padding.
        vocab_size=checkpoint.tensors[EMBEDDING].shape[0],
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        ropes=(rope, *graph.other_ropes),
        max_context=context,
        longest_context=longest,
        tie_word_embeddings=OUTPUT not in checkpoint.tensors,
        interleaved=family.interleaved,
        family=family.name,
        graph=graph,
    )


def _from_hugging_face(checkpoint: Checkpoint, endings: tuple[str, ...]) -> ModelConfig:
    path, metadata = checkpoint.path, checkpoint.metadata
    family = _family(checkpoint, "model_type", BY_MODEL_TYPE)
    defaults = family.defaults.get(str(metadata["model_type"]), {})
    read = Reader(path, {**defaults, **metadata})
    named = metadata.get("architectures") or []
    for architecture in named if isinstance(named, list) else [named]:
        if not str(architecture).endswith(endings):
            raise read.refused(
                f"its architecture is {architecture}",
                "a model with no language model head cannot generate",
            )
    read.refuse_unless("is_causal", (True,), "this graph is causal")
    read.refuse_unless("use_bidirectional_attention", (False,), "this graph is causal")
    for key in ("attention_bias", "mlp_bias"):
        read.refuse_unless(key, (False,), "biases are not supported")
    read.refuse_unless("tie_word_embeddings", (True, False), "it must be true or false")
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    head_dim = read.integer("head_dim", max(1, hidden // heads))
    layers = _layers(read, "num_hidden_layers", checkpoint)
    rope = hugging_face_rope(read, head_dim, family.theta)
    context, longest = contexts(read, "max_position_embeddings", rope.scaling)
    graph = family.from_hugging_face(read)
    graph = _windowed(read, graph, layers, longest, "sliding_window")
    for key in ("hidden_act", "hidden_activation"):
        allowed = _ACTIVATIONS[graph.activation]
        read.refuse_unless(key, allowed, f"{family.name}'s is {allowed[0]}")
    return ModelConfig(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        ropes=(rope, *graph.other_ropes),
        max_context=context,
        longest_context=longest,
        tie_word_embeddings=bool(read.value("tie_word_embeddings")),
        norm_offset=family.norm_offset,
        family=family.name,
        graph=graph,
    )


def _layers(read: Reader, key: str, checkpoint: Checkpoint) -> int:
    """The number of layers; no more than the file may hold, as tables are made for each."""
    layers, most = read.integer(key), len(checkpoint.tensors)
    if layers > most:
        raise ModelLoadFailed(
            f"{read.path}: {layers} layers cannot be in {most} tensors; convert the model again."
        )
    return layers


def _windowed(read: Reader, graph: Graph, layers: int, context: int, key: str) -> Graph:
    """``graph`` with the window that the file gives all layers, or all from one layer on."""
    if graph.windows or not read.value(key) or read.value("use_sliding_window") is False:
        return graph
    window = read.integer(key)
    if window >= context:
        return graph
    first = read.value("max_window_layers") if read.value("use_sliding_window") else 0
    if read.value("layer_types"):
        sliding = sliding_layers(read, layers, 1)
    elif isinstance(first, int):
        sliding = tuple(layer >= first for layer in range(layers))
    else:
        raise read.refused(f"max_window_layers is {str(first)[:50]!r}", "it must be a number")
    return replace(graph, windows=tuple(window if slides else None for slides in sliding))


def _rotates(config: ModelConfig) -> bool:
    """Whether every angle of every rotation is a finite number, at short and long contexts."""
    return all(
        bool((inverse_frequencies(rope, config.head_dim, context) * context).isfinite().all())
        for rope in config.ropes
        for context in (1, config.longest_context)
    )


def _check(config: ModelConfig, checkpoint: Checkpoint, beside: tuple[str, ...]) -> None:
    """Raise ModelLoadFailed unless the numbers agree with each other and with the tensors."""
    problem = None
    partial = BY_NAME[config.family].partial_rotation
    scaling = config.ropes[0].scaling
    pairs = config.rotary_dim // 2
    factors = () if scaling is None else (*scaling.factors, *scaling.long_factors)
    if config.num_heads % config.num_kv_heads:
        problem = f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
    elif config.head_dim % 2:
        problem = f"heads of {config.head_dim} have no pairs to rotate"
    elif config.rotary_dim != config.head_dim and not partial:
        problem = f"{config.family}'s RoPE covers whole heads, not {config.rotary_dim} numbers"
    elif config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        problem = f"RoPE cannot rotate {config.rotary_dim} numbers of heads of {config.head_dim}"
    elif scaling and {len(scaling.factors), len(scaling.long_factors)} - {0, pairs}:
        problem = f"{len(scaling.factors)} RoPE factors do not fit heads of {config.head_dim}"
    elif scaling and scaling.kind == "yarn" and config.ropes[0].theta == 1:
        problem = "YaRN cannot scale RoPE with a theta of 1"
    elif min(factors, default=1.0) <= 0:
        problem = f"a RoPE factor is {min(factors)}, but must be positive"
    if problem is None:
        check_tensors(checkpoint, config, beside)  # also that a head is no larger than the file
        if not _rotates(config):
            problem = "its RoPE rotates by angles that are no finite numbers"
    if problem:
        raise ModelLoadFailed(f"{checkpoint.path}: {problem}; convert the model again.")
