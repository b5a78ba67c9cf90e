"""A fixture that fails is made twice, and not again for each test that shares it.

With ``--reruns`` a test that fails makes again what failed of its fixtures. A fixture of a module
that waits for a minute in vain would cost a minute for each test of the module.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

TRIES = 2
_failures: dict[object, list[BaseException]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    made = fixturedef, request.node, request.param_index
    if len(failures := _failures.get(made, [])) == TRIES:
        # As pytest keeps it: what is not kept would not be torn down.
        error = failures[-1], failures[-1].__traceback__
        fixturedef.cached_result = None, fixturedef.cache_key(request), error
        raise failures[-1]
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as failure:
        _failures[made] = [*failures, failure]
        raise
