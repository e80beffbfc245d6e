"""The adapters that the table of strategies names can be made, with the frameworks here."""

from __future__ import annotations

import pytest

from hvdtrain.adapters import select
from hvdtrain.config.strategies import PACKAGES, STRATEGIES


@pytest.mark.parametrize("framework", PACKAGES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_adapter_can_be_created(framework: str, strategy: str) -> None:
    if framework not in STRATEGIES[strategy].adapters:
        return
    selected = select.adapter(framework, strategy, environ={})
    assert selected.name == strategy
    file = strategy.replace("-", "_")
    assert type(selected).__module__ == f"hvdtrain.adapters.{framework}.{file}"
