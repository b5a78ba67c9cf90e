"""AWQ, GPTQ and FP8 folders against transformers on the weights that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.kernels import TorchOps, native_absence
from llorch_worker.kernels.native.library import native_kernels
from llorch_worker.kernels.quantised_matrix import quantised_linear
from llorch_worker.model import Transformer, resolve_config
from llorch_worker.weights import Checkpoint, DenseLinears, Linears, fingerprint, open_checkpoint
from llorch_worker.weights.native_linear import NativeLinear, NativeLinears
from llorch_worker.weights.quantised_linear import QuantisedLinears
from tests.model.quantised_folder_of import LAYOUTS, write_quantised
from tests.model.test_families import CPU, make_reference, random_ids

SYMMETRIC = ("gptq", "gptq-v2-symmetric", "gptq-8-named-first", "gptq-7-named-second")
FORMS = dict.fromkeys(SYMMETRIC, "Q4_0") | dict.fromkeys(
    ("awq-32", "awq-64", "awq-128", "awq-row", "gptq-asymmetric", "gptq-v2"), "Q5_0"
)
"""What each layout is kept as; the others become dense."""
CASES = [("llama", layout) for layout in LAYOUTS] + [
    (family, layout)
    for family in ("qwen2", "gemma3", "phi3", "phi3-mini")
    for layout in ("awq-32", "gptq-act-order", "fp8-tensor", "fp8-blocks")
]


def write(family: str, layout: str, folder: Path) -> Any:
    """The reference, whose ``folder`` is quantised."""
    model = make_reference(family, intermediate_size=256)
    folder.mkdir(exist_ok=True)
    model.folder = write_quantised(model, folder, *LAYOUTS[layout])
    return model


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    reference = write(*request.param, tmp_path_factory.mktemp("quantised"))
    reference.layout = request.param[1]
    return reference


@torch.inference_mode()
def test_logits_are_those_of_the_weights_that_the_folder_stands_for(
    open_driver: Callable[..., Any], case: Any
) -> None:
    ids = random_ids(120)
    expected = case(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(open_driver(case.folder).logits(ids), expected, atol=1e-3, rtol=0)


def test_weights_are_read_exactly_dense_and_in_blocks(case: Any) -> None:
    checkpoint = open_checkpoint(case.folder)
    for name, values in case.state_dict().items():
        if "_proj.weight" not in name:
            continue
        assert torch.equal(checkpoint.load(name, torch.float32), values)
        form = checkpoint.group_form(name)
        assert (form.type.name if form else None) == FORMS.get(case.layout)
        if form is None:
            continue
        read = torch.zeros_like(values)

        def take(first: int, rows: Any, order: Any, form: Any = form, read: Any = read) -> None:
            assert order is None
            assert form.finite(rows)
            read[first : first + len(rows)] = torch.from_numpy(form.dequantise(rows))

        checkpoint.each_piece(name, take, row_multiple=16)
        assert torch.equal(read, values)


def kept(kind: str) -> Linears:
    if kind == "native":
        if native_absence() is not None:
            pytest.skip(f"native kernels: {native_absence()}")
        return NativeLinears(native_kernels())
    if kind == "quantised":
        return QuantisedLinears(CPU, torch.bfloat16, quantised_linear)
    return DenseLinears(CPU, torch.bfloat16)


def loaded(checkpoint: Checkpoint, kind: str, **options: Any) -> Transformer:
    return Transformer.load(
        checkpoint,
        resolve_config(checkpoint),
        dtype=torch.bfloat16,
        device=CPU,
        linears=kept(kind),
        ops=TorchOps(),
        **options,
    )


@pytest.mark.parametrize("kind", ["dense", "native", "quantised"])
def test_the_planned_bytes_are_those_that_are_loaded(case: Any, kind: str) -> None:
    checkpoint = open_checkpoint(case.folder)
    told: list[tuple[int, int]] = []
    model = loaded(checkpoint, kind, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (model.weight_bytes, model.weight_bytes)
    x = torch.randn(5, 128).bfloat16()
    exact = case.model.layers[1].mlp
    gate = exact.gate_up_proj if hasattr(exact, "gate_up_proj") else exact.gate_proj
    expected = x.float() @ gate.weight.T
    got = model.blocks[1].mlp.gate_up(x).float()[:, : len(gate.weight)]
    assert (got - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", ["native", "quantised"])
@pytest.mark.parametrize(("layout", "shared"), [("gptq", 4), ("awq-64", 2), ("awq-32", 1)])
def test_groups_keep_one_scale(tmp_path: Path, kind: str, layout: str, shared: int) -> None:
    checkpoint = open_checkpoint(write("llama", layout, tmp_path).folder)
    model = loaded(checkpoint, kind)
    down = model.blocks[0].mlp.down
    (piece,) = down.pieces if isinstance(down, NativeLinear) else down._pieces
    assert piece.scales.numel() == piece.rows * piece.columns // (32 * shared)


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(folder, target)
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, target / "model.safetensors")
    return target


AT = "model.layers.1.mlp.down_proj."


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({AT + new: tensors.pop(AT + old)})


def put(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda tensors: tensors.update({AT + name: edit(tensors[AT + name]).clone()})


@pytest.mark.parametrize(
    ("layout", "change", "named"),
    [
        ("awq-32", lambda tensors: tensors.pop(AT + "qzeros"), "has no tensor {}qzeros"),
        ("awq-32", rename("scales", "scale"), "has no tensor {}scales"),
        ("awq-32", rename("qweight", "weight"), "has no tensor {}qweight"),
        ("awq-32", put("scales", lambda each: each[:4]), "tensor {}scales is .4, 128. "),
        ("awq-32", put("qzeros", lambda each: each[:, :8]), "tensor {}qzeros is .8, 8. "),
        ("awq-32", put("qweight", lambda each: each[:128]), "tensor {}qzeros is .8, 16. "),
        ("awq-32", put("qweight", lambda each: each.view(-1)), "tensor {}qweight is I32 .4096."),
        ("awq-32", put("qzeros", lambda each: each.float()), "tensor {}qzeros is F32"),
        ("awq-32", put("scales", lambda each: each * torch.inf), "tensor {}scales has weights"),
        ("awq-32", lambda tensors: tensors.update({AT + "g_idx": torch.ones(1)}), "{}g_idx"),
        ("gptq", put("qzeros", lambda each: each + 1), "tensor {}qzeros .* but sym is true"),
        ("gptq-act-order", lambda tensors: tensors.pop(AT + "g_idx"), "has no tensor {}g_idx"),
        ("gptq-act-order", put("g_idx", lambda each: each - 1), "tensor {}g_idx has weights"),
        ("gptq-act-order", put("bias", lambda each: each + 1), "has a tensor {}bias"),
        ("fp8-tensor", rename("weight_scale", "weight_scal"), "has no tensor {}weight_scale"),
        ("fp8-blocks", put("weight_scale_inv", lambda each: each[:, :1]), "{}weight_scale_inv is"),
        ("fp8-blocks", put("weight", lambda each: each[:64]), "tensor {}weight is .64, 256."),
        (
            "fp8-tensor",
            put("weight", lambda each: (each.view(torch.uint8) | 127).view(each.dtype)),
            "tensor {}weight has weights",
        ),
    ],
)
def test_a_tensor_that_is_missing_renamed_or_misshapen_is_named(
    tmp_path: Path,
    open_driver: Callable[..., Any],
    layout: str,
    change: Callable[[dict[str, torch.Tensor]], Any],
    named: str,
) -> None:
    folder = write("llama", layout, tmp_path / "whole").folder
    path = changed(folder, tmp_path / "changed", change)
    with pytest.raises(ModelLoadFailed, match=named.format(AT)) as raised:
        open_driver(path)
    assert str(path) in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("most", [10**9, 2**40, 2**70])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("awq-row", lambda most: {"group_size": most}),
        ("fp8-channel", lambda most: {"strategy": "block", "block_structure": [1, most]}),
    ],
)
def test_groups_wider_than_a_matrix_are_the_matrix(
    tmp_path: Path, layout: str, changes: Callable[[int], dict[str, Any]], most: int
) -> None:
    """And take no more memory than it."""
    reference = write("llama", layout, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = config["quantization_config"]
    at = quantised["config_groups"]["group_0"]["weights"] if "config_groups" in quantised else None
    (quantised if at is None else at).update(changes(most))
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint, name = open_checkpoint(tmp_path), AT + "weight"
    assert torch.equal(checkpoint.load(name, torch.float32), reference.state_dict()[name])
    if layout == "awq-row":
        assert checkpoint.group_form(name) is not None


@pytest.mark.parametrize("layout", ["gptq", "gptq-8-named-first", "gptq-asymmetric"])
def test_zero_points_are_read_where_the_file_does_not_say_sym(tmp_path: Path, layout: str) -> None:
    reference = write("llama", layout, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["sym"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    name = AT + "weight"
    assert torch.equal(checkpoint.load(name, torch.float32), reference.state_dict()[name])


def test_a_truncated_tensor_is_named_and_a_changed_one_changes_the_fingerprint(
    tmp_path: Path,
) -> None:
    folder = write("llama", "awq-32", tmp_path / "whole").folder
    prints = {fingerprint(open_checkpoint(folder))}
    for kind in ("qweight", "qzeros", "scales"):
        edit = put(kind, lambda each: each.flip(1))
        prints.add(fingerprint(open_checkpoint(changed(folder, tmp_path / kind, edit))))
    assert len(prints) == 4
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ModelLoadFailed, match=r"tensor \S+ runs past the end"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("awq-32", {"quant_method": "bitsandbytes"}, 'quant_method .* "bitsandbytes", but only'),
        ("awq-32", {"quant_method": "hqq"}, 'quant_method in quantization_config is "hqq"'),
        ("awq-32", {"quant_method": ["awq"]}, "quant_method .* is"),
        ("awq-32", {"bits": 8}, "bits in quantization_config is 8, but only 4"),
        ("awq-32", {"version": "GEMV"}, 'version .* is "gemv", but only "gemm"'),
        ("awq-32", {"zero_point": False}, "zero_point .* false"),
        ("awq-32", {"group_size": 0}, "group_size .* 0"),
        ("gptq", {"bits": 8}, "bits .* 8"),
        ("gptq", {"checkpoint_format": "marlin"}, 'checkpoint_format .* "marlin"'),
        ("gptq", {"dynamic": {"+:.*down": {"bits": 8}}}, r"dynamic.\+:.\*down.bits .* 8"),
        ("gptq", {"dynamic": {"+:.*down": {"sym": False}}}, r"dynamic.\+:.\*down.sym .* false"),
        ("gptq", {"sym": "yes"}, 'sym in quantization_config is "yes"'),
        ("gptq", {"format": "gptq_v2"}, 'format .* "gptq_v2", but only "gptq"'),
        ("gptq", {"dynamic": [1]}, "dynamic .* but only {}"),
        ("fp8-blocks", {"fmt": "e5m2"}, 'fmt .* "e5m2"'),
        ("fp8-blocks", {"weight_block_size": [128]}, "size of blocks .* .128."),
        (
            "fp8-tensor",
            {"kv_cache_scheme": {"num_bits": 8}},
            'kv_cache_scheme .* {"num_bits": 8}, but only null',
        ),
        ("fp8-tensor", {"sparsity_config": {"format": "x"}}, "sparsity_config"),
        ("fp8-tensor", {"format": "pack-quantized"}, 'format .* "pack-quantized"'),
        ("fp8-tensor", {"config_groups": {"a": {"weights": None}}}, "groups.a.weights .* null"),
        (
            "fp8-tensor",
            {"config_groups": {"a": {"weights": {"type": "int"}}}},
            'groups.a.weights.type .* "int", but only "float"',
        ),
    ],
)
def test_a_layout_that_cannot_be_unpacked_is_refused_by_its_key(
    tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    config = LAYOUTS[layout][0] | changes
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ModelLoadFailed, match=message) as raised:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in raised.value.message
    assert "; serve the model unquantised" in raised.value.message
    assert "\n" not in raised.value.message
