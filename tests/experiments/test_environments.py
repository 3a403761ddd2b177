"""Networks as environments: how they are named."""

from __future__ import annotations

import pytest

from experiments.environments import parsed
from experiments.targets import ConfigError


def test_networks_have_options_after_colons() -> None:
    assert parsed("bert:tokens=64:layers=2") == ("bert", {"tokens": 64, "layers": 2})
    assert parsed("squeezenet") == ("squeezenet", {})
    assert parsed("resnet50:blocks=1-2") == ("resnet50", {"blocks": (1, 2)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bart:tokens=4", "--networks: there is no bart"),
        ("bert:tokens", "--networks: 'tokens' of 'bert:tokens' must be OPTION=NUMBER"),
    ],
)
def test_what_is_not_written_so_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(text)
