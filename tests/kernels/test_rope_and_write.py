"""RoPE and the write to the cache, against the torch twin."""

from __future__ import annotations

import pytest
import torch

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import TorchOps
from llorch_worker.kernels.triton import TritonOps
from tests.kernels.interpreter import DEVICE
from tests.kernels.paged import layer_kv

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SLOTS = (33, 2, 17, 16, 47)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (6, 3, 8)])
def test_triton_rotates_and_stores_as_the_twin(heads, kv_heads, head_dim, dtype, kv_dtype: KvDtype):
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(len(SLOTS), heads + 2 * kv_heads, head_dim, generator=generator)
    qkv = qkv.to(DEVICE, dtype)
    qkv[1, heads] = 0  # a key of zeros needs a scale too
    angles = torch.rand(len(SLOTS), head_dim // 2, generator=generator).to(DEVICE) * 6
    slots = torch.tensor(SLOTS, device=DEVICE)

    results = []
    for ops in (TorchOps(), TritonOps(processors=1)):
        kv = layer_kv(3, kv_heads, head_dim, dtype, kv_dtype)
        rotated = qkv.clone()
        ops.rope_and_write(rotated, angles.cos(), angles.sin(), slots, kv)
        results.append((rotated, *kv.gather(slots, torch.float32), kv))
    (q, k, v, kv), (other_q, other_k, other_v, other_kv) = results
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(other_q, q, rtol=rtol, atol=rtol)
    # Rounding the rotated number may move a narrow format to the adjacent code.
    rtol = {"auto": rtol, "fp8": 2**-3, "int8": rtol}[kv_dtype]
    atol = {"auto": rtol, "fp8": 2**-9, "int8": 4 / 127}[kv_dtype]
    torch.testing.assert_close(other_k, k, rtol=rtol, atol=atol)
    torch.testing.assert_close(other_v, v, rtol=rtol, atol=atol)
    untouched = torch.ones(3 * 16, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    for one, other in ((kv.keys, other_kv.keys), (kv.values, other_kv.values)):
        one, other = (t.flatten(0, 1).contiguous().view(torch.uint8) for t in (one, other))
        assert torch.equal(one[untouched], other[untouched])


def test_int8_rounds_to_the_nearest_step_of_its_scale():
    kv = layer_kv(1, 2, 32, torch.float32, "int8")
    rows = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    slots = torch.tensor([0, 5, 9], device=DEVICE)
    kv.write(slots, rows, 2 * rows)
    k, v = kv.gather(slots, torch.float32)
    step = rows.abs().amax(-1, keepdim=True) / 127
    assert bool(((k - rows).abs() <= 0.501 * step).all())
    assert bool(((v - 2 * rows).abs() <= 1.002 * step).all())


def test_fp8_clamps_values_out_of_range():
    kv = layer_kv(1, 1, 8, torch.float32, "fp8")
    rows = torch.tensor([[[1e4, -1e4, 448, 0.5, 0, 1, -2, 3]]], device=DEVICE)
    kv.write(torch.tensor([3], device=DEVICE), rows, rows)
    k, _ = kv.gather(torch.tensor([3], device=DEVICE), torch.float32)
    assert k.flatten().tolist() == [448, -448, 448, 0.5, 0, 1, -2, 3]
