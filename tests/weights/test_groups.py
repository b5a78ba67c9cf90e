"""Blocks unpacked into codes, scales and offsets, against gguf's own dequantisation."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llorch_worker.weights.groups import group_form
from tests.weights.quantised import QUANTISED


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_unpacked_groups_give_the_weights_that_gguf_gives(type_):
    form = group_form(type_)
    columns, block_bytes = GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(0).integers(0, 256, (6, 3 * block_bytes), np.uint8)

    with np.errstate(invalid="ignore"):  # random scales may be NaN
        expected = dequantize(raw, type_)
        groups = form.unpack(raw)
        scales = groups.scales.repeat(form.group, axis=1)
        weights = scales * (groups.codes.astype(np.float32) - form.zero)
        if form.has_offsets:
            weights += groups.offsets.repeat(form.group, axis=1)
    assert groups.codes.shape == (6, 3 * columns)
    assert groups.codes.max() < 2**form.bits
    assert (groups.offsets is not None) == form.has_offsets
    np.testing.assert_array_equal(weights, expected)


def test_a_type_without_scaled_integers_has_no_form():
    assert group_form(GGMLQuantizationType.BF16) is None
    assert group_form(GGMLQuantizationType.IQ2_XXS) is None
