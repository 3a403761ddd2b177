"""A policy as the prior of tree search over e-graphs."""

from __future__ import annotations

import pytest

from tests.rl.trap import blank
from tests.search.fakes import FakeOracle
from tests.search.test_strategies import KEY, program, rules
from xrl_jax.rl.prior import PolicyPrior
from xrl_jax.search.base import Problem


def test_the_prior_is_how_often_the_policy_takes_each_rule() -> None:
    shares = PolicyPrior(blank())(Problem(program(), rules(), FakeOracle()), KEY)
    assert shares.keys() <= {r.name for r in rules().rules}
    assert sum(shares.values()) == pytest.approx(1.0)
