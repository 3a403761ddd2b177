"""Networks as environments: their names and options, and a batch of several networks."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from experiments.environments import params_of, parsed
from experiments.targets import ConfigError
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.language.table import compile_rules


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
def test_malformed_networks_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(text)


def test_networks_with_different_numbers_of_results_share_a_batch() -> None:
    """One network has one result; the other has nine, as DALL-E's layers have, which is more than a
    graph has room for at first.
    """
    x = jnp.ones((2, 2))
    one = from_jax(lambda x: x @ x, x)
    nine = from_jax(lambda x: [(x + n) @ x for n in range(9)], x)
    start = params_of([one, nine], compile_rules(standard_rules()[:8]), envs=4).start
    outputs = start.graph.globals.outputs
    assert outputs.shape == (4, 16)
    assert (outputs >= 0).sum(axis=1).tolist() == [1, 1, 9, 9]
    assert start.seconds[0] == start.seconds[1] < start.seconds[2] == start.seconds[3]
