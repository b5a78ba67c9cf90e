"""Every family against transformers in float32, from a folder and from a GGUF file alike."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import safetensors.torch
import torch
import transformers

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.kernels import TorchOps, native_absence
from llorch_worker.kernels.native.library import native_kernels
from llorch_worker.kernels.native.native_ops import NativeOps
from llorch_worker.kernels.quantised_matrix import quantised_linear
from llorch_worker.model import Transformer, resolve_config
from llorch_worker.model.block import Block
from llorch_worker.model.families.gemma import GEMMA2, GEMMA3
from llorch_worker.model.forward_pass import ForwardPass
from llorch_worker.model.reader import Reader
from llorch_worker.weights import DenseLinears, Linears, open_checkpoint
from llorch_worker.weights.native_linear import NativeLinears
from llorch_worker.weights.quantised_linear import QuantisedLinears
from tests.model.gguf_of import write_gguf_of

Open = Callable[..., Any]
CPU = torch.device("cpu")

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    # Larger than the usual 0.02, so that attention is far from uniform.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + pair / 10 for pair in range(12)],
        "long_factor": [1.0 + pair / 2 for pair in range(12)],
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
    },
    "tie_word_embeddings": True,
}
"""Of heads of 32, of which 24 numbers rotate."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": 21}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 0},
    ),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "phi3": ("Phi3", {"sliding_window": 21}),
    "phi3-mini": ("Phi3", LONG),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "ministral": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 21,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 21, "query_pre_attn_scalar": 32}
        | {"tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "sliding_window": 21,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
    ),
}


KINDS = tuple(
    gguf.GGMLQuantizationType[name]
    for name in (
        *("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_0", "Q5_K", "Q4_1", "Q3_K", "Q5_1", "Q2_K"),
        *("IQ4_XS", "IQ4_NL", "BF16", "F16"),
    )
)
"""The block types of the families' files on the hub."""


def make_reference(family: str, **others: Any) -> Any:
    """transformers' model with random weights."""
    name, options = FAMILIES[family]
    torch.manual_seed(7)
    kind = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, kind)(**SHAPE | others | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
                parameter -= 1.0 * name.startswith("Gemma")  # it adds 1 itself
            elif key.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    return model


@pytest.fixture(scope="session", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``folder``: where it is saved."""
    model = make_reference(request.param)
    model.folder = tmp_path_factory.mktemp("family")
    model.save_pretrained(model.folder)
    return model


@pytest.fixture(scope="session")
def file(reference: Any) -> Path:
    """For what begins after the weights are read, and so is the same for a folder."""
    return write_gguf_of(reference, reference.folder / "model.gguf")


@pytest.fixture(scope="session", params=["folder", "gguf"])
def path(request: pytest.FixtureRequest, reference: Any, file: Path) -> Path:
    return Path(reference.folder) if request.param == "folder" else file


STEPS = [0, 40, 41, 97, 98, 99, 100, 115]
"""The ends of 115 tokens' chunks, some of which are single tokens."""


def random_ids(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(96, (count,), generator=generator).tolist()


@torch.inference_mode()
def test_logits_agree_with_transformers(open_driver: Open, reference: Any, path: Path) -> None:
    ids = random_ids(200)
    expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(open_driver(path).logits(ids), expected, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_each_layer_agrees_with_transformers(open_driver: Open, reference: Any, path: Path) -> None:
    ids, driver = random_ids(100), open_driver(path)
    states: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(_: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        states.append(((args or (kwargs["hidden_states"],))[0][0], out[0]))

    hooks = [
        layer.register_forward_hook(note, with_kwargs=True) for layer in reference.model.layers
    ]
    reference(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()

    def fed(block: Block, given: torch.Tensor, expected: torch.Tensor) -> Callable[..., Any]:
        """``block`` with the input that it has in transformers."""

        def run(_x: torch.Tensor, _residual: Any, step: ForwardPass) -> Any:
            x, residual = block(given.clone(), None, step)
            torch.testing.assert_close(x + residual, expected, atol=1e-4, rtol=0)
            return x, residual

        return run

    pairs = zip(driver.model.blocks, states, strict=True)
    blocks = tuple(fed(block, *state) for block, state in pairs)
    driver.model = dataclasses.replace(driver.model, blocks=blocks)
    driver.logits(ids)


@pytest.mark.parametrize(("kv_dtype", "limit"), [("fp8", 0.45), ("int8", 0.1)])
@torch.inference_mode()
def test_a_quantised_cache_moves_probabilities_no_more_than_llamas(
    open_driver: Open, file: Path, kv_dtype: str, limit: float
) -> None:
    """Llama's move by 0.26 and 0.056; random weights this large make any rounding matter."""
    ids, ends = random_ids(115), STEPS
    exact, got = (
        torch.cat(
            [
                driver.step({"a": ids[first:last]}, all_logits=True)
                for first, last in itertools.pairwise(ends)
            ]
        ).softmax(-1)
        for driver in (open_driver(file), open_driver(file, kv_dtype=kv_dtype))
    )
    assert (got - exact).abs().sum(-1).mean() < limit


@torch.inference_mode()
def test_a_prompt_in_chunks_and_token_by_token_equals_the_prompt_at_once(
    open_driver: Open, file: Path
) -> None:
    driver, ids = open_driver(file), random_ids(115)
    expected = driver.logits(ids)
    rows = [
        driver.step({"a": ids[first:last]}, all_logits=True)
        for first, last in itertools.pairwise(STEPS)
    ]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_100_greedy_tokens_are_those_of_transformers(
    open_driver: Open, reference: Any, file: Path
) -> None:
    driver, ids = open_driver(file), random_ids(40)
    row = driver.step({"a": ids})[-1]
    while len(ids) < 140:
        ids.append(int(row.argmax()))
        row = driver.step({"a": ids[-1:]})[-1]
    # The choice after each token but the last, given the tokens before it.
    chosen = reference(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    assert ids[40:] == chosen[39:-1]


@pytest.mark.skipif(native_absence() is not None, reason=f"native kernels: {native_absence()}")
def test_the_native_kernels_agree_with_torch_in_bfloat16(open_driver: Open, file: Path) -> None:
    ids = random_ids(200)
    exact, torchs, natives = (
        open_driver(file, dtype=dtype, ops=ops).logits(ids).softmax(-1)
        for dtype, ops in (
            (torch.float32, TorchOps()),
            (torch.bfloat16, TorchOps()),
            (torch.bfloat16, NativeOps(native_kernels())),
        )
    )
    # No further from the exact probabilities than torch is.
    assert (natives - exact).abs().mean() < 1.5 * (torchs - exact).abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_block_types_of_real_files_give_the_logits_of_their_weights(
    open_driver: Open, family: str, tmp_path: Path
) -> None:
    reference = make_reference(
        family, hidden_size=256, intermediate_size=512, num_attention_heads=8
    )
    path, ids = write_gguf_of(reference, tmp_path / "m.gguf", KINDS), random_ids(100)
    expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(open_driver(path).logits(ids), expected, atol=1e-3, rtol=0)
    quantised: list[Linears] = [QuantisedLinears(CPU, torch.bfloat16, quantised_linear)]
    if native_absence() is None:
        quantised.append(NativeLinears(native_kernels()))
    probabilities = [
        open_driver(path, dtype=torch.bfloat16, linears=linears).logits(ids).softmax(-1)
        for linears in (None, *quantised)
    ]
    dense, *others = ((each - expected.softmax(-1)).abs().mean() for each in probabilities)
    assert max(others) < 2 * dense  # native products round activations to 8 bits


def test_the_planned_bytes_are_those_that_are_loaded(path: Path) -> None:
    checkpoint, device = open_checkpoint(path), CPU
    told: list[tuple[int, int]] = []
    model = Transformer.load(
        checkpoint,
        resolve_config(checkpoint),
        dtype=torch.bfloat16,
        device=device,
        linears=DenseLinears(device, torch.bfloat16),
        ops=TorchOps(),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (model.weight_bytes, model.weight_bytes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "unknown"},
        {"hidden_activation": "unknown"},
        {"rope_parameters": {"rope_type": "unknown", "factor": 2.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "unknown", "factor": 2.0}},
    ],
)
def test_an_unknown_activation_or_rope_type_is_named(
    reference: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    shutil.copy(reference.folder / "model.safetensors", tmp_path)
    config = json.loads((reference.folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadFailed, match="'unknown'"):
        resolve_config(open_checkpoint(tmp_path))


def test_a_tensor_that_is_missing_extra_or_of_another_shape_is_named(
    reference: Any, tmp_path: Path
) -> None:
    tensors = safetensors.torch.load_file(reference.folder / "model.safetensors")
    shutil.copy(reference.folder / "config.json", tmp_path)
    for name in [name for name in tensors if "layers.1." in name]:
        others = {key: value for key, value in tensors.items() if key != name}
        for changed, message in (
            (others, f"has no tensor {name}"),
            (others | {name: tensors[name][:-1].clone()}, f"tensor {name} is "),
            (tensors | {name + "_extra": tensors[name].clone()}, f"has a tensor {name}_extra"),
        ):
            safetensors.torch.save_file(changed, tmp_path / "model.safetensors")
            with pytest.raises(ModelLoadFailed, match=message):
                resolve_config(open_checkpoint(tmp_path))


def test_a_gguf_tensor_that_is_renamed_or_of_another_shape_is_named(
    reference: Any, tmp_path: Path
) -> None:
    path = write_gguf_of(reference, tmp_path / "model.gguf")
    data = path.read_bytes()
    names = [t.name for t in gguf.GGUFReader(path).tensors if t.name.startswith("blk.1.")]
    assert len(names) >= 6
    for name in names:
        at = data.index(name.encode())
        after = at + len(name)
        renamed = data[: after - 1] + b"_" + data[after:]
        # The number of dimensions, then the first.
        columns = int.from_bytes(data[after + 4 : after + 12], "little") - 1
        reshaped = data[: after + 4] + columns.to_bytes(8, "little") + data[after + 12 :]
        for changed in (renamed, reshaped):
            path.write_bytes(changed)
            with pytest.raises(ModelLoadFailed, match=name[:-1].replace(".", r"\.")):
                resolve_config(open_checkpoint(path))


def test_the_first_files_of_gemma_2_have_its_own_window() -> None:
    named = {"embedding_length": 64, "block_count": 4, "attention.head_count": 4}
    read = Reader(Path("model.gguf"), named)
    assert GEMMA2.from_gguf(read).windows == (4096, None, 4096, None)
    with pytest.raises(ModelLoadFailed, match=r"attention\.sliding_window is missing"):
        GEMMA3.from_gguf(read)


def test_an_unknown_architecture_or_rope_type_of_a_gguf_file_is_named(
    reference: Any, tmp_path: Path
) -> None:
    path = write_gguf_of(reference, tmp_path / "model.gguf")
    data = path.read_bytes()
    for word in (
        b"yarn",
        b"linear",
        str(gguf.GGUFReader(path).fields["general.architecture"].contents()).encode(),
    ):
        value = len(word).to_bytes(8, "little") + word
        if value in data:
            path.write_bytes(data.replace(value, value[:-1] + b"?"))
            with pytest.raises(ModelLoadFailed, match=rf"'{word[:-1].decode()}\?'"):
                resolve_config(open_checkpoint(path))
