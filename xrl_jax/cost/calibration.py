"""Calibration of the roofline from timings: rates by operator class, multiples by lowering,
corrections by whole programs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from xrl_jax.cost.config import DEFAULT, CostConfig
from xrl_jax.cost.rates import DEFAULT_RATES, Rates
from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.view import CLASSES, CORRECTED, KINDS, in_other_layout
from xrl_jax.graph import ops
from xrl_jax.libraries.registry import libraries
from xrl_jax.lower.table import number_of

Multiples = Mapping[tuple[int, int, int], float]  # of the roofline's time, by `lowering_kind_of`


@dataclass(frozen=True, order=True)
class Sample:
    """One timing for calibration."""

    op_class: str
    flops: float
    bytes: float
    seconds: float
    lowering_kind: tuple[int, int, int] = (0, 0, 0)  # see `lowering_kind_of`


_PASSES = 3  # over arrays, that an addition of two makes
_LEAST_PER_BYTE = 1e-13  # seconds; bounds the fit where all samples are small


def priors(platform: str) -> Multiples:
    """Return multiples of the plain lowering's time that other lowerings usually take on a JAX
    platform, by `lowering_kind_of`, as the libraries state them (`Library.priors`).
    """
    found: dict[tuple[int, int, int], float] = {}
    for library in libraries():
        for (op, kind), text in library.priors(platform).items():
            words = text.split()
            for name, multiple in zip(words[::2], words[1::2], strict=True):
                found[ops.OPS[op].code, kind, number_of(op, name)] = float(multiple)
    return {
        in_other_layout(at): m for at, m in found.items() if at[0] == ops.OPS["conv"].code
    } | found


def calibrate(
    samples: Sequence[Sample],
    rates: Rates = DEFAULT_RATES,
    prior: Multiples = MappingProxyType({}),
    *,
    config: CostConfig = DEFAULT,
) -> Rates:
    """Fit rates to timings, class by class; the result does not depend on their order, to the last
    bit.

    A class with few samples keeps its rates. For classes that compute (conv, dot) the flop rate
    is the quantile `config.peak` of the rates that its samples reach, without its overhead. For
    the others an overhead and a bandwidth are fitted; for elementwise loops the overhead is per
    pass, of which an addition has three. A lowering that was timed gets the median of its
    multiples of this roofline; one that was timed only in the other layout gets the median of
    those; any other gets its `prior` multiple of the plain lowering's, as far as timings of
    other kinds agree (`_with_untimed`). The estimates of all but the plain lowering are
    optimistic.
    """
    samples = sorted(samples)
    flop_rate, bandwidth = dict(rates.flop_rate), dict(rates.bandwidth)
    overhead, pass_overhead = dict(rates.overhead), rates.pass_overhead
    for c in CLASSES:
        mine = [s for s in samples if s.op_class == c and s.seconds > 0]
        if len(mine) < config.fewest_samples:
            continue
        if c in ("conv", "dot"):
            # Without the overhead, or small kernels would make a large one look slow.
            net = [s.seconds - min(overhead[c], 0.5 * s.seconds) for s in mine]
            reached = [s.flops / t for s, t in zip(mine, net, strict=True)]
            flop_rate[c] = float(np.quantile(reached, config.peak))
            continue
        start, bandwidth[c] = _line(mine)
        if c == "elementwise":
            pass_overhead = start / _PASSES
        else:
            overhead[c] = start
    multiples: dict[tuple[int, int, int], list[float]] = {}
    for s in samples:
        c = s.op_class
        expected = max(s.flops / flop_rate[c], s.bytes / bandwidth[c]) + overhead[c]
        multiples.setdefault(s.lowering_kind, []).append(s.seconds / expected)
    timed = {at: float(np.median(m)) for at, m in multiples.items()}
    found = _with_untimed({in_other_layout(at): m for at, m in timed.items()} | timed, prior)
    found = {at: m * config.optimistic if at[2] else m for at, m in found.items()}
    return Rates(flop_rate, bandwidth, overhead, rates.scale, found, pass_overhead)


def _with_untimed(timed: Multiples, prior: Multiples) -> dict[tuple[int, int, int], float]:
    """Return the multiples of timed lowerings, and estimates for untimed ones derived from them.

    The plain lowering gets the median of its multiples in other kinds of the operator; otherwise a
    change of kind would look like a gain. Any other lowering gets its `prior` multiple of the plain
    one's, but at least the smallest multiple it has where it was timed in another kind.
    """
    by_name = defaultdict(list)  # multiples of each lowering of an operator, in all kinds
    for (op, _, i), multiple in timed.items():
        by_name[op, i].append(multiple)
    own = {op: float(np.median(m)) for (op, i), m in by_name.items() if i == 0}
    found = {**{(op, k, 0): m for op, m in own.items() for k in range(KINDS)}, **timed}
    for (op, kind, i), multiple in prior.items():
        guess = multiple * found.get((op, kind, 0), 1.0)
        found.setdefault((op, kind, i), max(guess, min(by_name.get((op, i), ()), default=0.0)))
    return found


def _line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Fit an overhead in seconds and a bandwidth in bytes per second to the samples.

    The fit is the line with the least squares of relative errors, neither parameter being negative.
    """
    seconds = np.array([s.seconds for s in samples])
    moved = np.array([s.bytes for s in samples])
    (start, per_byte), _ = nnls(
        np.stack([1 / seconds, moved / seconds], axis=1), np.ones(len(samples))
    )
    return float(start), float(1 / max(per_byte, _LEAST_PER_BYTE))


def pessimistic_costs(costs: CostTable) -> CostTable:
    """Return the table with pessimistic estimates of untimed lowerings.

    They are above the unbiased estimates by the factor by which optimistic ones are below. A
    lowering that looks fast by optimistic estimates is worth timing; one that looks fast by
    pessimistic ones is fast as far as is known.
    """
    return replace(costs, multiple=costs.multiple.at[..., 1:].multiply(costs.optimistic**-2))


def varied(costs: CostTable, key: jax.Array, *, spread: float) -> CostTable:
    """Return the table as another machine might correct it: each correction times a log-normal
    factor.

    Args:
      spread: standard deviation of the factors' logarithms.
    """
    return replace(
        costs, scale=costs.scale * jnp.exp(spread * jax.random.normal(key, costs.scale.shape))
    )


def correct(
    rates: Rates,
    shares: Sequence[Mapping[str, float]],
    measured: Sequence[float],
    *,
    config: CostConfig = DEFAULT,
) -> Rates:
    """Return rates whose scales bring predicted times closer to the times of whole programs.

    Each scale is multiplied by a factor k_c. The factors minimise sum_p (sum_c k_c share_pc / t_p -
    1)^2 + ridge sum_c (k_c - common)^2, where `common` is the median ratio of measured to predicted
    time. The ridge pulls all factors towards it, so that few programs cannot set one against
    another.

    Args:
      shares: for each program, predicted seconds by `CORRECTED` under these rates.
      measured: seconds of each program.
    """
    used = [c for c in CORRECTED if any(s.get(c, 0.0) > 0 for s in shares)]
    if not used:
        return rates
    t = np.asarray(measured)
    x = np.array([[s.get(c, 0.0) for c in used] for s in shares]) / t[:, None]
    common = float(np.median(1.0 / np.maximum(x.sum(axis=1), 1e-12)))
    pull = np.sqrt(config.ridge)
    a = np.vstack([x, pull * np.eye(len(used))])
    b = np.concatenate([np.ones(len(t)), np.full(len(used), pull * common)])
    change = np.linalg.lstsq(a, b, rcond=None)[0]
    change = np.clip(change, common / config.most_change, common * config.most_change)
    scales = {c: rates.scale[c] * float(k) for c, k in zip(used, change, strict=True)}
    return replace(rates, scale=dict(rates.scale) | scales)
