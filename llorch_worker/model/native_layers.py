"""The table by which the native kernels run a model's blocks in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from llorch_worker.kernels import Ops
from llorch_worker.kernels.native.layers import Layer, MatrixTable, NativeLayers
from llorch_worker.kernels.native.native_ops import NativeOps
from llorch_worker.kernels.native.tiles import Matrix
from llorch_worker.model.block import Block, RmsNorm
from llorch_worker.model.config import ModelConfig
from llorch_worker.weights import Linear
from llorch_worker.weights.native_linear import NativeLinear


def native_refusal(config: ModelConfig, ops: Ops) -> str | None:
    """The reason why the layers of such a model run one operation at a time, or None."""
    if not isinstance(ops, NativeOps):
        return f"{ops.name} kernels run them"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "tiles need matrices with an even number of columns"
    return None


def native_layers(blocks: Sequence[Block], config: ModelConfig, ops: Ops) -> NativeLayers | None:
    """Computes what ``blocks`` do, with the same bits; None if ``native_refusal`` has a reason, or
    the matrices are kept for other kernels.

    What a family adds to a block, ``_layer`` names here and ``layers.c`` computes: experts would be
    matrices beside a router's, attention sinks one pointer more.
    """
    if not isinstance(ops, NativeOps) or native_refusal(config, ops) is not None:
        return None
    if not isinstance(blocks[0].attention.qkv, NativeLinear):
        return None
    kept: list[object] = [blocks]

    def table(linear: Linear) -> MatrixTable:
        assert isinstance(linear, NativeLinear)
        pieces = [piece.matrix() for piece in linear.pieces]
        array = (Matrix * len(pieces))(*pieces)
        kept.append(array)
        return MatrixTable(ctypes.addressof(array), len(pieces), linear.rows)

    return NativeLayers(
        ops.kernels,
        [_layer(block, table) for block in blocks],
        [block.attention.form.window or 0 for block in blocks],
        hidden=config.hidden_size,
        inter=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        gelu=config.graph.activation == "gelu_tanh",
        eps=config.rms_norm_eps,
        residual_scale=config.graph.residual_scale,
        kept=kept,
    )


def _layer(block: Block, table: Callable[[Linear], MatrixTable]) -> Layer:
    attention, mlp = block.attention, block.mlp
    norms = attention.norms
    return Layer(
        qkv=table(attention.qkv),
        output=table(attention.output),
        gate_up=table(mlp.gate_up),
        down=table(mlp.down),
        before_attention=_weight(block.around_attention.before),
        after_attention=_weight(block.around_attention.after),
        before_mlp=_weight(block.around_mlp.before),
        after_mlp=_weight(block.around_mlp.after),
        bias=None if attention.bias is None else attention.bias.data_ptr(),
        q_norm=None if norms is None else norms.q.weight.data_ptr(),
        k_norm=None if norms is None else norms.k.weight.data_ptr(),
        norms_whole=norms is not None and len(norms.q.weight) != attention.head_dim,
        rope=attention.rope,
        scale=attention.form.scale_for(attention.head_dim),
        cap=attention.form.softcap or 0.0,
    )


def _weight(norm: RmsNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
