"""A stub of the whole service for the tests of your own code: no Redis, no torch, no worker.

In the ``conftest.py`` at the root of your tests::

    pytest_plugins = ["llorch_worker.testing"]

The fixture ``llorch`` is a :class:`Stub`: a Redis in memory at ``llorch.url``, and jobs that are
answered with what the test scripts. ``llorch_gateway`` is the URL of a gateway before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llorch_worker.testing.answers import Answer
from llorch_worker.testing.stub import Stub

__all__ = ["Answer", "Stub", "llorch", "llorch_gateway", "llorch_model", "llorch_stub"]


@pytest.fixture(scope="session")
def llorch_model() -> str:
    """The name of the model that the stub serves. Override this fixture for another one."""
    return "demo"


@pytest.fixture(scope="session")
def llorch_stub(llorch_model: str) -> Iterator[Stub]:
    """The stub that all tests of the session share."""
    with Stub(llorch_model) as stub:
        yield stub


@pytest.fixture
def llorch(llorch_stub: Stub) -> Iterator[Stub]:
    """The stub without jobs, results and scripted answers of other tests."""
    llorch_stub.reset()
    yield llorch_stub
    llorch_stub.reset()


@pytest.fixture(scope="session")
def llorch_gateway(llorch_stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway before the stub; OpenAI's API is at ``/v1``."""
    # Here, because it needs an extra.
    from llorch_worker.testing.http import serving

    with serving(llorch_stub.url, tmp_path_factory.mktemp("llorch-files")) as url:
        yield url
