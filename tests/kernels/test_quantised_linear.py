"""Quantised matrices on a card: packing, and products against dequantise-then-multiply."""

from __future__ import annotations

import pytest
import torch

from llorch_worker.kernels import quantised_matrix
from llorch_worker.kernels.quantised_matrix import QuantisedMatrix
from llorch_worker.kernels.triton import quantised_linear
from tests.kernels.interpreter import DEVICE
from tests.sizes import sized

FORMS = [(4, 32, 8, False), (8, 32, 128, False), (4, 32, 0, True), (5, 32, 0, True)]
FORMS += [(6, 16, 32, False), (4, 16, 0, True), (5, 32, 16, False)]
"""bits, group, zero, offsets: Q4_0, Q8_0, Q4_K, Q5_K, Q6_K; Q2_K, Q5_0."""
IDS = ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q5_0"]


def randoms(
    rows: int, columns: int, bits: int, group: int, offsets: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[0, :] = 2**bits - 1
    # Whole numbers over a power of two, which float16 holds exactly.
    tables = torch.randint(-63, 64, (2, rows, columns // group), generator=generator) / 256
    scales, shifts = tables.to(DEVICE)
    return codes.to(DEVICE), scales, shifts if offsets else None


@pytest.mark.parametrize(("bits", "group", "zero", "offsets"), FORMS, ids=IDS)
def test_packing_keeps_every_weight_in_the_predicted_bytes(bits, group, zero, offsets):
    codes, scales, shifts = randoms(5, 96, bits, group, offsets)
    matrix = QuantisedMatrix.pack(codes, scales, shifts, bits=bits, zero=zero, factor=2.0**-8)
    weights = (codes.float() - zero) * scales.repeat_interleave(group, dim=1)
    if shifts is not None:
        weights += shifts.repeat_interleave(group, dim=1)
    assert torch.equal(matrix.dequantise(), weights)
    assert (matrix.rows, matrix.columns) == (5, 96)
    assert matrix.nbytes == QuantisedMatrix.bytes_of(
        5, 96, bits=bits, group=group, has_offsets=offsets
    )


@pytest.mark.parametrize("tokens", sized(usual=[3, 20], full=[1, 3, 20]))
@pytest.mark.parametrize(("bits", "group", "zero", "offsets"), FORMS, ids=IDS)
def test_products_equal_those_of_the_dequantised_matrix(bits, group, zero, offsets, tokens):
    codes, scales, shifts = randoms(37, 608, bits, group, offsets)
    matrix = QuantisedMatrix.pack(codes, scales, shifts, bits=bits, zero=zero, factor=2.0**-8)
    x = torch.randn(tokens, 608, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for dtype, out_dtype, rtol in (
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float32, 2e-3),
    ):
        out = torch.zeros(tokens, 50, dtype=out_dtype, device=DEVICE)
        expected = out.clone()
        quantised_matrix.quantised_linear(x.to(dtype), matrix, expected, 7)
        quantised_linear.quantised_linear(x.to(dtype), matrix, out, 7)
        scale = float(expected.abs().max())
        torch.testing.assert_close(out, expected, rtol=rtol, atol=rtol * scale)
        assert not bool(out[:, :7].any() or out[:, 44:].any())


@pytest.mark.parametrize(
    ("tokens", "rows", "tiles"),
    [(2, 4096, (16, 16)), (17, 4096, (64, 16)), (64, 32000, (64, 64)), (512, 12288, (128, 128))],
)
def test_tiles_are_the_largest_that_give_each_processor_two(tokens, rows, tiles):
    chosen = quantised_linear.MatmulTiles.of(tokens, rows, processors=132)
    assert (chosen.tokens, chosen.rows) == tiles


def test_tiles_change_only_at_powers_of_two():
    for rows in (64, 4096, 11008, 128256):
        for power in range(1, 12):
            low, high = 2 ** (power - 1) + 1, 2**power
            of = quantised_linear.MatmulTiles.of
            assert len({of(tokens, rows, 132) for tokens in range(low, high + 1)}) == 1


@pytest.mark.parametrize("processors", [1, 2, 3, 100])
@pytest.mark.parametrize("tokens", [20, 70, 130])
def test_products_do_not_depend_on_the_tiles(tokens, processors, monkeypatch):
    monkeypatch.setattr(quantised_linear, "_processors", lambda _: processors)
    codes, scales, _ = randoms(150, 96, 6, 16, offsets=False)
    matrix = QuantisedMatrix.pack(codes, scales, None, bits=6, zero=32, factor=2.0**-8)
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out, expected = torch.zeros(2, tokens, 150, device=DEVICE)
    quantised_matrix.quantised_linear(x, matrix, expected, 0)
    quantised_linear.quantised_linear(x, matrix, out, 0)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
