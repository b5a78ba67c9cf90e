"""BERT's graph over one ragged row: all tokens of all texts, without padding.

Sources: Devlin et al. 2018 and Liu et al. 2019, as transformers' ``BertModel`` and ``RobertaModel``
compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
import torch.nn.functional as F

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.encoder.config import Activation, EncoderConfig
from llorch_worker.model.encoder.pooling import Pooling
from llorch_worker.weights import Checkpoint, FusedWeight, Linear, Linears, Part

_ACTIVATIONS: Final[dict[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
_NAMES: Final = {
    "hugging_face": {
        "tokens": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "types": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
        "layer": "encoder.layer.{}.",
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "output": "attention.output.dense",
        "output_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "down_norm": "output.LayerNorm",
    },
    "gguf": {
        "tokens": "model.embed_tokens",
        "positions": "position_embd",
        "types": "token_types",
        "norm": "token_embd_norm",
        "layer": "",
        "q": "model.layers.{}.self_attn.q_proj",
        "k": "model.layers.{}.self_attn.k_proj",
        "v": "model.layers.{}.self_attn.v_proj",
        "output": "model.layers.{}.self_attn.o_proj",
        "output_norm": "blk.{}.attn_output_norm",
        "up": "model.layers.{}.mlp.up_proj",
        "down": "model.layers.{}.mlp.down_proj",
        "down_norm": "blk.{}.layer_output_norm",
    },
}
"""What a checkpoint of each layout calls the tensors."""
_HEADS: Final = {
    ("hugging_face", "bert"): ("bert.pooler.dense", "classifier"),
    ("hugging_face", "roberta"): ("classifier.dense", "classifier.out_proj"),
    ("gguf", "bert"): ("cls", "cls.output"),
}
"""The two matrices of a classifier's head, by layout and family."""
_UNUSED: Final = ("embeddings.position_ids", "pooler.", "cls.", "lm_head.")
"""Derived values, and heads that no vector comes of."""


@dataclass(frozen=True)
class Texts:
    """Texts one after the other; those of equal length side by side are computed fastest."""

    token_ids: torch.Tensor
    """int64 ``[tokens]``."""
    lengths: Sequence[int]
    """The tokens of each text, at least 1."""
    types: torch.Tensor | None = None
    """int64 ``[tokens]``: 0 for the first text of a pair, 1 for the second; None for all 0."""


def positions_within(lengths: torch.Tensor) -> torch.Tensor:
    """The position of each token in its text: 0, 1, ... int64 ``[tokens]``."""
    firsts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - firsts.repeat_interleave(lengths)


@dataclass(frozen=True)
class _Affine:
    """A linear layer with its bias."""

    linear: Linear
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.bias


@dataclass(frozen=True)
class _Norm:
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class _Layer:
    qkv: _Affine
    output: _Affine
    output_norm: _Norm
    up: _Affine
    down: _Affine
    down_norm: _Norm


@dataclass(frozen=True)
class _Head:
    """A classifier over the first token's vector."""

    pooler: _Affine
    classifier: _Affine


class Encoder:
    """An encoder's weights, and the pass that uses them."""

    def __init__(
        self,
        config: EncoderConfig,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        norm: _Norm,
        layers: Sequence[_Layer],
        head: _Head | None,
    ) -> None:
        self.config = config
        self._tokens, self._positions, self._types = tables
        self._norm = norm
        self._layers = layers
        self._head = head
        self._activate = _ACTIVATIONS[config.activation]

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        config: EncoderConfig,
        linears: Linears,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Encoder:
        """Reads the weights; norms, biases and the embedding are kept in ``dtype``.

        Raises ModelLoadFailed if one is missing, or the file has others.
        """
        return _Load(checkpoint, config, linears, dtype, device).encoder()

    def hidden(self, texts: Texts) -> torch.Tensor:
        """Each token's vector in the last layer: ``[tokens, width]`` in the compute dtype."""
        config, lengths = self.config, texts.lengths
        positions = positions_within(torch.tensor(lengths)) + config.first_position
        device = self._tokens.device
        x = F.embedding(texts.token_ids.to(device), self._tokens)
        x = x + F.embedding(positions.to(device), self._positions)
        types = texts.types
        if types is None or config.token_types == 1:
            types = torch.zeros_like(texts.token_ids)
        x = self._norm(x + F.embedding(types.to(device), self._types))
        for layer in self._layers:
            q, k, v = layer.qkv(x).view(len(x), 3, config.num_heads, config.head_dim).unbind(1)
            attended = _attend(q, k, v, lengths).view(x.shape)
            x = layer.output_norm(x + layer.output(attended))
            x = layer.down_norm(x + layer.down(self._activate(layer.up(x))))
        return x

    def vectors(self, texts: Texts, pooling: Pooling) -> torch.Tensor:
        """float32 ``[texts, width]``, not normalised."""
        return pooling.vectors(self.hidden(texts), texts.lengths)

    def scores(self, texts: Texts) -> torch.Tensor:
        """The head's number of each, as the model's files say: float32 ``[texts, labels]``. Raises
        ValueError without a head."""
        if self._head is None:
            raise ValueError("the model has no head that scores")
        first = Pooling("cls").vectors(self.hidden(texts), texts.lengths)
        first = first.to(self._tokens.dtype)
        logits = self._head.classifier(torch.tanh(self._head.pooler(first))).float()
        return logits.sigmoid() if self.config.squashes else logits


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Attention within each text: all ``[tokens, heads, head_dim]``. Neighbours of one length go
    together."""
    pieces = []
    start = 0
    for length, neighbours in groupby(lengths):
        count = sum(1 for _ in neighbours)
        rows = slice(start, start + count * length)
        queries, keys, values = (
            each[rows].view(count, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v)
        )
        attended = F.scaled_dot_product_attention(queries, keys, values)
        pieces.append(attended.transpose(1, 2).reshape(count * length, *q.shape[1:]))
        start = rows.stop
    return torch.cat(pieces)


class _Load:
    """Reads the tensors of one checkpoint, and notes which."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EncoderConfig,
        linears: Linears,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._linears = linears
        self._dtype, self._device = dtype, device
        self._names = _NAMES[checkpoint.layout]
        # A model with a head has its encoder under a name.
        word = f"{self._names['tokens']}.weight"
        self._inside = f"{config.family}."
        self._before = "" if word in checkpoint.tensors else self._inside
        self._read: set[str] = set()

    def encoder(self) -> Encoder:
        config, width = self._config, self._config.hidden_size
        tables = (
            self._vector("tokens", "weight", config.vocab_size, width),
            self._vector("positions", "weight", config.max_positions, width),
            self._vector("types", "weight", config.token_types, width),
        )
        norm = self._norm("norm")
        layers = [self._layer(layer) for layer in range(config.num_layers)]
        head = self._head() if config.labels else None
        self._refuse_others()
        return Encoder(config, tables, norm, layers, head)

    def _layer(self, layer: int) -> _Layer:
        width, inner = self._config.hidden_size, self._config.intermediate_size
        return _Layer(
            qkv=self._affine(("q", "k", "v"), width, width, layer),
            output=self._affine(("output",), width, width, layer),
            output_norm=self._norm("output_norm", layer),
            up=self._affine(("up",), inner, width, layer),
            down=self._affine(("down",), width, inner, layer),
            down_norm=self._norm("down_norm", layer),
        )

    def _head(self) -> _Head:
        width = self._config.hidden_size
        pooler, classifier = _HEADS[self._checkpoint.layout, self._config.family]
        return _Head(
            self._named_affine((pooler,), width, width),
            self._named_affine((classifier,), self._config.labels, width),
        )

    def _affine(self, whats: tuple[str, ...], rows: int, columns: int, layer: int) -> _Affine:
        return self._named_affine(tuple(self._name(what, layer) for what in whats), rows, columns)

    def _named_affine(self, names: tuple[str, ...], rows: int, columns: int) -> _Affine:
        weight = self._weight(names, "weight", rows, columns)
        bias = self._weight(names, "bias", rows)
        return _Affine(self._linears.load(self._checkpoint, weight), self._loaded(bias))

    def _norm(self, what: str, layer: int = 0) -> _Norm:
        width = self._config.hidden_size
        weight, bias = (self._vector(what, kind, width, layer=layer) for kind in ("weight", "bias"))
        return _Norm(weight, bias, self._config.layer_norm_eps)

    def _vector(self, what: str, kind: str, *shape: int, layer: int = 0) -> torch.Tensor:
        return self._loaded(self._weight((self._name(what, layer),), kind, *shape))

    def _loaded(self, weight: FusedWeight) -> torch.Tensor:
        return weight.load(self._checkpoint, self._dtype).to(self._device)

    def _weight(self, names: tuple[str, ...], kind: str, *shape: int) -> FusedWeight:
        parts = tuple(Part(f"{name}.{kind}", shape) for name in names)
        for part in parts:
            self._read.add(part.name)
            self._checkpoint.require(part.name, part.shape)
        return FusedWeight(parts)

    def _name(self, what: str, layer: int) -> str:
        inside = what not in ("tokens", "positions", "types", "norm")
        name = self._names["layer"] * inside + self._names[what]
        return self._before + name.format(layer)

    def _refuse_others(self) -> None:
        """Raises ModelLoadFailed for a tensor that would change the results and is not used."""
        for name in self._checkpoint.tensors.keys() - self._read:
            if not name.removeprefix(self._inside).startswith(_UNUSED):
                raise ModelLoadFailed(
                    f"{self._checkpoint.path} has a tensor {self._checkpoint.stored_name(name)} "
                    "that an encoder's graph does not use; serve a plain one."
                )
