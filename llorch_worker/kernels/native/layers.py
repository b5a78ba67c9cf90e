"""All layers of a pass in one native call, by tables of pointers that ``layers.c`` reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.native.library import NativeKernels
from llorch_worker.kernels.native.paged_attention import NativeAttention, layer_arguments

_P, _L, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class MatrixTable(ctypes.Structure):
    """A matrix: pieces, whose outputs lie side by side."""

    _fields_ = (("pieces", _P), ("count", _L), ("outputs", _L))


class Layer(ctypes.Structure):
    """The weights of a layer; absent norms and biases are None."""

    _fields_ = (
        *((name, MatrixTable) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _P) for name in ("before_attention", "after_attention")),
        *((name, _P) for name in ("before_mlp", "after_mlp", "bias", "q_norm", "k_norm")),
        ("norms_whole", _L),
        ("rope", _L),
        ("scale", _D),
        ("cap", _D),
    )


class LayersTable(ctypes.Structure):
    """All layers, and what they have in common."""

    _fields_ = (
        ("layers", _P),
        *((name, _L) for name in ("count", "hidden", "inter", "heads", "kv_heads", "head_dim")),
        ("gelu", _L),
        ("eps", _D),
        ("residual_scale", _D),
    )


class View(ctypes.Structure):
    """What layers see that share a group in the cache and a window; 0 is none."""

    _fields_ = (("group", _L), ("window", _L))


class Cells(ctypes.Structure):
    """A layer's part of a cache."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values", "key_scales", "value_scales")),
        ("view", _L),
    )


class Sequences(ctypes.Structure):
    """Some sequences of a step in a group of layers; see ``NativeAttention``."""

    _fields_ = (
        ("group", _L),
        ("count", _L),
        ("lengths", _P),
        ("tables", _P),
        ("table_stride", _L),
    )


class StepTable(ctypes.Structure):
    """What changes with each step."""

    _fields_ = (
        ("rows", _L),
        *((name, _P) for name in ("residual", "added", "angles", "query_growth", "slots")),
        *((name, _P) for name in ("cells", "views")),
        *((name, _L) for name in ("view_count", "kv_form", "block_size")),
        ("sequences", _P),
        ("sequence_count", _L),
    )


class KvLayers(Protocol):
    """The keys and values of all layers."""

    @property
    def layers(self) -> list[LayerKV]: ...

    @property
    def group_of(self) -> list[int]:
        """For each layer the index of the group in whose cells it keeps its tokens."""


class _CacheTable:
    """What layers have in one cache."""

    def __init__(self, kv: KvLayers, windows: Sequence[int]) -> None:
        pairs = list(zip(kv.group_of, windows, strict=True))
        views = sorted(set(pairs))
        *_, self.form = layer_arguments(kv.layers[0])
        self.views = (View * len(views))(*(View(*view) for view in views))
        self.cells = (Cells * len(pairs))(
            *(
                Cells(*layer_arguments(layer)[:-1], views.index(pair))
                for layer, pair in zip(kv.layers, pairs, strict=True)
            )
        )


class NativeLayers:
    """The layers of a model, made when it loads."""

    def __init__(
        self,
        kernels: NativeKernels,
        layers: Sequence[Layer],
        windows: Sequence[int],
        *,
        hidden: int,
        inter: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        gelu: bool,
        eps: float,
        residual_scale: float,
        kept: object,
    ) -> None:
        """``windows``: of each layer, 0 for none. ``kept``: what owns the memory that ``layers``
        point to."""
        self._run = kernels.run_layers
        self._layers = (Layer * len(layers))(*layers)
        self._windows = windows
        self._model = LayersTable(
            ctypes.addressof(self._layers),
            len(layers),
            hidden,
            inter,
            heads,
            kv_heads,
            head_dim,
            gelu,
            eps,
            residual_scale,
        )
        self._kept = kept
        self._caches: WeakKeyDictionary[KvLayers, _CacheTable] = WeakKeyDictionary()

    def __call__(
        self,
        residual: torch.Tensor,
        kv: KvLayers,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        query_growth: torch.Tensor | None,
        slots: Sequence[torch.Tensor],
        attentions: Sequence[Sequence[NativeAttention]],
    ) -> torch.Tensor:
        """What is to be added to ``residual``, which the call overwrites: [tokens, hidden] each.

        ``residual``: the embedding. ``angles``: of each kind of rotation, [tokens, head_dim / 2].
        ``slots``, ``attentions``: of each group of layers.
        """
        table = self._caches.get(kv)
        if table is None:
            table = self._caches[kv] = _CacheTable(kv, self._windows)
        added = torch.empty_like(residual)
        pointers = [part.data_ptr() for pair in angles for part in pair]
        places = [part.data_ptr() for part in slots]
        parts = [
            Sequences(
                group,
                each.lengths.shape[1],
                each.lengths.data_ptr(),
                each.tables.data_ptr(),
                each.tables.shape[1],
            )
            for group, of_group in enumerate(attentions)
            for each in of_group
        ]
        sequences = (Sequences * len(parts))(*parts)
        angle_table = (_P * len(pointers))(*pointers)
        slot_table = (_P * len(places))(*places)
        step = StepTable(
            len(residual),
            residual.data_ptr(),
            added.data_ptr(),
            ctypes.addressof(angle_table),
            None if query_growth is None else query_growth.data_ptr(),
            ctypes.addressof(slot_table),
            ctypes.addressof(table.cells),
            ctypes.addressof(table.views),
            len(table.views),
            table.form,
            next(each.block_size for of_group in attentions for each in of_group),
            ctypes.addressof(sequences),
            len(parts),
        )
        failed = self._run(
            ctypes.addressof(self._model), ctypes.addressof(step), torch.get_num_threads()
        )
        if failed:
            raise MemoryError("not enough memory for a forward pass")
        return added
