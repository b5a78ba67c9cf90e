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
FORMS += [(4, 128, 8, False), (5, 64, 16, False), (5, 128, 16, False)]
"""bits, group, zero, offsets: Q4_0, Q8_0, Q4_K, Q5_K, Q6_K; Q2_K, Q5_0; of GPTQ and AWQ."""
IDS = ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q5_0", "4, 128", "5, 64", "5, 128"]


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
    columns = 96 if group < 64 else 384
    codes, scales, shifts = randoms(5, columns, bits, group, offsets)
    matrix = QuantisedMatrix.pack(codes, scales, shifts, bits=bits, zero=zero, factor=2.0**-8)
    weights = (codes.float() - zero) * scales.repeat_interleave(group, dim=1)
    if shifts is not None:
        weights += shifts.repeat_interleave(group, dim=1)
    assert torch.equal(matrix.dequantise(), weights)
    assert (matrix.rows, matrix.columns) == (5, columns)
    assert matrix.nbytes == QuantisedMatrix.bytes_of(
        5, columns, bits=bits, group=group, has_offsets=offsets
    )


@pytest.mark.parametrize("tokens", sized(usual=[3, 70], full=[1, 3, 16, 20, 70]))
@pytest.mark.parametrize(("bits", "group", "zero", "offsets"), FORMS, ids=IDS)
def test_products_equal_those_of_the_dequantised_matrix(bits, group, zero, offsets, tokens):
    columns = 608 if group < 64 else 1408
    codes, scales, shifts = randoms(37, columns, bits, group, offsets)
    matrix = QuantisedMatrix.pack(codes, scales, shifts, bits=bits, zero=zero, factor=2.0**-8)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for dtype, out_dtype, rtol in (
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


@pytest.mark.parametrize("tokens", sized(usual=[33], full=[1, 8, 9, 17, 33, 64]))
@pytest.mark.parametrize("processors", [1, 100])
def test_products_do_not_depend_on_the_tiles(tokens, processors, monkeypatch):
    monkeypatch.setattr(quantised_linear, "_processors", lambda _: processors)
    codes, scales, _ = randoms(70, 96, 6, 16, offsets=False)
    matrix = QuantisedMatrix.pack(codes, scales, None, bits=6, zero=32, factor=2.0**-8)
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE).half()
    out, alone = torch.zeros(2, tokens, 70, device=DEVICE)
    quantised_linear.quantised_linear(x, matrix, out, 0)
    for token in (0, tokens - 1):
        quantised_linear.quantised_linear(x[token : token + 1], matrix, alone[token:], 0)
        assert torch.equal(out[token], alone[token])


@pytest.mark.parametrize("rows", [[16, 32, 5], [8, 24, 16]])
def test_stacked_matrices_have_the_rows_of_their_parts(rows):
    """Where a part ends inside a tile, the parts are packed anew."""
    parts = []
    for count in rows:
        codes, scales, shifts = randoms(count, 96, 5, 32, offsets=True)
        parts.append(QuantisedMatrix.pack(codes, scales, shifts, bits=5, zero=0, factor=2.0**-8))
    stacked = QuantisedMatrix.stack(parts)
    assert torch.equal(stacked.dequantise(), torch.cat([part.dequantise() for part in parts]))
    assert stacked.nbytes == QuantisedMatrix.bytes_of(
        sum(rows), 96, bits=5, group=32, has_offsets=True
    )


def test_large_products_dequantise_a_slice_of_the_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(quantised_linear, "_SLICE_BYTES", 1)
    codes, scales, _ = randoms(41, 96, 4, 32, offsets=False)
    matrix = QuantisedMatrix.pack(codes, scales, None, bits=4, zero=8, factor=2.0**-8)
    x = torch.randn(65, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
    out, expected = torch.zeros(2, 65, 41, device=DEVICE)
    quantised_matrix.quantised_linear(x, matrix, expected, 0)
    quantised_linear.quantised_linear(x, matrix, out, 0)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
