"""All layers in one native call, against the same blocks one operation at a time: the same bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llorch_worker.engine_options import KvDtype, Variant
from llorch_worker.kernels.native.native_ops import NativeOps
from llorch_worker.model.native_layers import native_refusal
from llorch_worker.weights.native_linear import NativeLinears
from tests.kernels.native import native_or_skip, variant_params
from tests.model.conftest import Driver
from tests.model.gguf_of import write_gguf_of
from tests.model.test_families import FAMILIES, KINDS, make_reference, random_ids

Open = Callable[..., Driver]


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def open_pair(open_driver: Open) -> Callable[..., tuple[Driver, Driver]]:
    """A model whose layers run in one call, and the same without."""

    def open_pair(
        path: Path, variant: Variant | Any = "auto", **options: Any
    ) -> tuple[Driver, Driver]:
        kernels = native_or_skip(variant)
        options |= {"ops": NativeOps(kernels), "linears": NativeLinears(kernels)}
        drivers = [open_driver(path, dtype=torch.bfloat16, **options) for _ in range(2)]
        assert drivers[0].model.native is not None
        drivers[1].model = dataclasses.replace(drivers[1].model, native=None)
        return drivers[0], drivers[1]

    return open_pair


CHUNKS: tuple[dict[str, int], ...] = (
    {"a": 40},
    {"a": 1},
    {"a": 1, "b": 1},
    {"b": 1, "a": 3},  # as drafts
    {"a": 1, "b": 1, "c": 150, "d": 19},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"a": 1},
)
"""Steps, with the new tokens of each sequence: prompts, decodes, and both."""


def same_in_every_step(pair: tuple[Driver, Driver]) -> None:
    """The logits of all tokens, and the keys and values, have the same bits."""
    ids = itertools.cycle(random_ids(200))
    for chunks in CHUNKS:
        given = {name: list(itertools.islice(ids, count)) for name, count in chunks.items()}
        one, other = (driver.step(given, all_logits=True) for driver in pair)
        assert one.isfinite().all()
        assert torch.equal(one, other), chunks
    for cells, others in zip(*(driver.cache.kv.layers for driver in pair), strict=True):
        for part in ("keys", "values", "key_scales", "value_scales"):
            a, b = getattr(cells, part), getattr(others, part)
            assert a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_each_family_in_one_call_have_the_bits_of_its_blocks(
    open_pair: Any, family: str, tmp_path: Path
) -> None:
    reference = make_reference(family)
    same_in_every_step(open_pair(write_gguf_of(reference, tmp_path / "m.gguf")))


@pytest.mark.parametrize("run", [1, 3])
def test_matrices_of_all_block_types_alone_and_mixed_have_the_bits_of_their_products(
    open_pair: Any, run: int, tmp_path: Path
) -> None:
    """The types alternate, a run of tensors each: of one type, Q, K and V are one piece."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    reference = make_reference("llama", **shape, num_hidden_layers=1 + 2 * run)
    kinds = [kind for kind in KINDS for _ in range(run)]
    same_in_every_step(open_pair(write_gguf_of(reference, tmp_path / "m.gguf", kinds)))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two groups of layers in the cache, and norms and windows of all kinds but one."""
    return write_gguf_of(make_reference("gemma3"), tmp_path_factory.mktemp("gemma") / "m.gguf")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_of(make_reference("llama"), tmp_path_factory.mktemp("llama") / "m.gguf")


@pytest.mark.parametrize("variant", variant_params())
def test_every_variant_gives_the_bits_of_the_blocks(
    open_pair: Any, variant: Variant, gemma: Path
) -> None:
    same_in_every_step(open_pair(gemma, variant))


def test_several_threads_give_the_bits_of_one(open_pair: Any, threads: int, gemma: Path) -> None:
    one, several = open_pair(gemma)
    several.model = one.model
    for chunks in CHUNKS:
        given = {name: random_ids(count) for name, count in chunks.items()}
        torch.set_num_threads(1)
        expected = one.step(given, all_logits=True)
        torch.set_num_threads(threads)
        assert torch.equal(several.step(given, all_logits=True), expected), chunks


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_quantised_caches_hold_the_bits_that_the_blocks_write(
    open_pair: Any, kv_dtype: KvDtype, gemma: Path
) -> None:
    same_in_every_step(open_pair(gemma, kv_dtype=kv_dtype))


def test_a_sequence_has_the_same_bits_alone_in_company_and_in_drafts(
    open_pair: Any, llama: Path
) -> None:
    alone, company = open_pair(llama)
    company.model = alone.model
    ids, others = random_ids(60), random_ids(90)
    expected = [alone.step({"a": ids[:40]})]
    expected += [alone.step({"a": [token]}) for token in ids[40:]]
    got = [company.step({"a": ids[:40], "b": others})[:1]]
    got += [company.step({"a": [t], "b": [t]})[:1] for t in ids[40:50]]
    drafts = company.step({"b": others[:1], "a": ids[50:]}, all_logits=True)[1:]
    assert torch.equal(torch.cat(got), torch.cat(expected[:11]))
    assert torch.equal(drafts, torch.cat(expected[11:]))


def test_another_cache_of_the_same_model_has_cells_of_its_own(open_pair: Any, llama: Path) -> None:
    one, other = open_pair(llama)
    other.model, ids = one.model, random_ids(30)
    expected = one.step({"a": ids})
    assert torch.equal(other.step({"a": ids}), expected)
    assert torch.equal(one.step({"a": ids[:1]}), other.step({"a": ids[:1]}))


def test_a_forward_pass_without_memory_says_so(open_pair: Any, llama: Path) -> None:
    driver, _ = open_pair(llama)
    driver.model.native._run = lambda *_: -1
    with pytest.raises(MemoryError, match="a forward pass"):
        driver.step({"a": [1]})


def test_what_the_native_call_cannot_run_is_named(open_driver: Open, random_llama: Path) -> None:
    driver = open_driver(random_llama)
    assert driver.model.native is None
    assert native_refusal(driver.model.config, driver.model.ops) == "torch kernels run them"
    odd = dataclasses.replace(driver.model.config, intermediate_size=111)
    refusal = native_refusal(odd, NativeOps(native_or_skip()))
    assert refusal == "tiles need matrices with an even number of columns"
