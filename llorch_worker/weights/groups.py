"""GGUF blocks unpacked, not dequantised: small integers with a scale for each group of columns.

Every type here has the form ``weight = scale * (code - zero) + offset`` with one scale, and in
some types one offset, for each group of 16 or 32 columns of a row. In K types each of these is the
product of a float16 number for a block of 256 columns and a small whole number for the group. Block
layouts are ggml's (https://github.com/ggml-org/ggml, ``ggml-common.h``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llorch_worker.kernels.native.tiles import Levels, TileForm
from llorch_worker.model_files.model_file import Bytes

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Groups:
    """Some rows of a quantised matrix."""

    codes: Bytes
    """[rows, columns] uint8"""
    scales: Floats
    """[rows, columns / group] float32"""
    offsets: Floats | None
    """[rows, columns / group] float32, or None if the type has none"""


@dataclass(frozen=True)
class BlockScales:
    """What the scales and offsets of some rows of a K type are products of."""

    scales: Floats
    """[rows, columns / 256] float32"""
    offsets: Floats | None
    """[rows, columns / 256] float32, or None if the type has none"""
    level_bytes: Bytes
    """[rows, columns / 256 * bytes of a block] uint8: the small numbers, laid out by ``levels``"""


@dataclass(frozen=True)
class GroupForm:
    """How a block type stores weights."""

    type: GGMLQuantizationType
    group: int
    """Columns that share a scale: 16 or 32."""
    code_bits: int
    """Bits of a code in the file."""
    zero: int
    halves: tuple[int, ...]
    """Where a block has a float16: its scale, and its offset if the type has one."""
    unpack_blocks: Callable[[Bytes], Groups]
    """[blocks, block bytes] to groups with one row a block."""
    levels: Levels = "none"
    """``none`` where scales and offsets are float16 in the file, rather than products."""
    unpack_scales: Callable[[Bytes], BlockScales] | None = None
    """Like ``unpack_blocks``; None without levels."""
    shared: int = 1
    """Groups with the same scale, a power of 2; above 1 there are neither levels nor offsets."""

    @property
    def bits(self) -> int:
        """Bits of a code in native tiles: 4 or 8."""
        return 4 if self.code_bits <= 4 else 8

    @property
    def has_offsets(self) -> bool:
        return len(self.halves) > 1

    @property
    def tiles(self) -> TileForm:
        """How native tiles keep it."""
        kept = (self.bits, self.group, self.zero, self.levels, self.has_offsets, self.shared)
        return TileForm(*kept)

    @property
    def half_factor(self) -> float:
        """The divisor that makes scales and offsets fit float16.

        Products lie around 1e-3: divided by 2^-8 they have 11 bits of precision from 2e-7 to 255.
        """
        return 1.0 if self.levels == "none" else 2.0**-8

    def unpack(self, rows: Bytes) -> Groups:
        """Unpack ``rows``: [rows, row bytes] of raw blocks."""
        groups = self.unpack_blocks(rows.reshape(-1, GGML_QUANT_SIZES[self.type][1]))
        count = len(rows)
        return Groups(
            groups.codes.reshape(count, -1),
            groups.scales.reshape(count, -1),
            None if groups.offsets is None else groups.offsets.reshape(count, -1),
        )

    def unpack_block_scales(self, rows: Bytes) -> BlockScales | None:
        """The scales of ``rows``, [rows, row bytes] of raw blocks; None without levels."""
        if self.unpack_scales is None:
            return None
        blocks = self.unpack_scales(rows.reshape(-1, GGML_QUANT_SIZES[self.type][1]))
        count = len(rows)
        return BlockScales(
            blocks.scales.reshape(count, -1),
            None if blocks.offsets is None else blocks.offsets.reshape(count, -1),
            np.ascontiguousarray(blocks.level_bytes).reshape(count, -1),
        )

    def dequantise(self, rows: Bytes) -> Floats:
        """The values [rows, columns] of raw blocks; the same bits as gguf's."""
        groups = self.unpack(rows)
        values = groups.codes.astype(np.float32).reshape(*groups.scales.shape, self.group)
        values -= np.float32(self.zero)
        values *= groups.scales[..., None]
        if groups.offsets is not None:
            values += groups.offsets[..., None]
        return values.reshape(len(rows), -1)

    def finite(self, rows: Bytes) -> bool:
        """Whether all values of raw blocks are finite; looks at their scales only."""
        blocks = rows.reshape(-1, GGML_QUANT_SIZES[self.type][1])
        return all(bool(np.isfinite(_half(blocks, at)).all()) for at in self.halves)

    def fits_half(self, groups: Groups) -> bool:
        """Whether float16 holds scales and offsets once divided by ``half_factor``."""
        tables = [groups.scales] if groups.offsets is None else [groups.scales, groups.offsets]
        largest = self.half_factor * float(np.finfo(np.float16).max)
        return all(bool(np.abs(table).max() < largest) for table in tables)


def group_form(type_: GGMLQuantizationType) -> GroupForm | None:
    """The form of a block type; None if its values are not scaled integers."""
    return _FORMS.get(type_)


def _half(blocks: Bytes, start: int) -> Floats:
    """[blocks, 1], the float16 at byte ``start`` of each."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2, n]: the low nibbles, then the high ones."""
    out = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0x0F, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])
    return out


def _bit_fields(packed: Bytes, bits: int, count: int) -> Bytes:
    """[..., n] bytes to [..., count, n]: field 0 holds each byte's lowest ``bits`` bits."""
    shifts = np.arange(0, count * bits, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _q4_0(blocks: Bytes) -> Groups:
    return Groups(_halves(blocks[:, 2:]), _half(blocks, 0), None)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: Bytes) -> Bytes:
    """[blocks, 4] bytes to [blocks, 2, 16]: bit i of the 32 becomes bit 4 of column i."""
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")
    return (bits << np.uint8(4)).reshape(-1, 2, 16)


def _q5_0(blocks: Bytes) -> Groups:
    codes = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Groups(codes, _half(blocks, 0), None)


def _q5_1(blocks: Bytes) -> Groups:
    codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Groups(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), _half(blocks, 0), None)


def _six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """[blocks, 12] bytes to eight scales and eight minima of a Q4_K or Q5_K block."""
    low, high, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, (both & 15) | (low >> 2 & 48)), axis=1)
    minima = np.concatenate((high & 63, (both >> 4) | (high >> 2 & 48)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> Groups:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32))
    return Groups(codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minima)


def _q4_k_scales(blocks: Bytes) -> BlockScales:
    return BlockScales(_half(blocks, 0), -_half(blocks, 2), blocks[:, 4:16])


def _q5_k(blocks: Bytes) -> Groups:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    codes |= _bit_fields(blocks[:, 16:48], 1, 8) << 4
    return Groups(codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Groups:
    codes = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    codes |= _bit_fields(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4).reshape(-1, 8, 32) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Groups(codes, _half(blocks, 208) * scales, None)


def _q6_k_scales(blocks: Bytes) -> BlockScales:
    return BlockScales(_half(blocks, 208), None, blocks[:, 192:208])


def _q2_k(blocks: Bytes) -> Groups:
    codes = _bit_fields(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4)
    scales = (blocks[:, :16] & 15).astype(np.float32)
    minima = (blocks[:, :16] >> 4).astype(np.float32)
    return Groups(codes, _half(blocks, 80) * scales, -_half(blocks, 82) * minima)


def _q2_k_scales(blocks: Bytes) -> BlockScales:
    return BlockScales(_half(blocks, 80), -_half(blocks, 82), blocks[:, :16])


def _q3_k(blocks: Bytes) -> Groups:
    codes = _bit_fields(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4).reshape(-1, 8, 32)
    # The third bit is inverted: set means that 4 is not subtracted. Hence the zero of 4.
    codes |= _bit_fields(blocks[:, :32], 1, 8) << 2
    scales = _q3_k_scales(blocks)
    return Groups(codes, scales.scales * scales.level_bytes.view(np.int8), None)


def _q3_k_scales(blocks: Bytes) -> BlockScales:
    packed = blocks[:, 96:108]
    low = _halves(packed[:, :8]).reshape(-1, 16)
    high = _bit_fields(packed[:, 8:], 2, 4).reshape(-1, 16)
    return BlockScales(_half(blocks, 108), None, (low | high << np.uint8(4)) - np.uint8(32))


_T = GGMLQuantizationType
_FORMS = {
    form.type: form
    for form in (
        GroupForm(_T.Q4_0, 32, 4, 8, (0,), _q4_0),
        GroupForm(_T.Q4_1, 32, 4, 0, (0, 2), _q4_1),
        GroupForm(_T.Q5_0, 32, 5, 16, (0,), _q5_0),
        GroupForm(_T.Q5_1, 32, 5, 0, (0, 2), _q5_1),
        GroupForm(_T.Q8_0, 32, 8, 128, (0,), _q8_0),
        GroupForm(_T.Q2_K, 16, 2, 0, (80, 82), _q2_k, "nibble", _q2_k_scales),
        GroupForm(_T.Q3_K, 16, 3, 4, (108,), _q3_k, "byte", _q3_k_scales),
        GroupForm(_T.Q4_K, 32, 4, 0, (0, 2), _q4_k, "six_bit", _q4_k_scales),
        GroupForm(_T.Q5_K, 32, 5, 0, (0, 2), _q5_k, "six_bit", _q4_k_scales),
        GroupForm(_T.Q6_K, 16, 6, 32, (208,), _q6_k, "byte", _q6_k_scales),
    )
}
