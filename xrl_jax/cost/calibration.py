"""From timings to the roofline: rates by class, multiples by form, corrections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from xrl_jax.cost.roofline import (
    CLASSES,
    CORRECTED,
    DEFAULT_RATES,
    KINDS,
    CostTable,
    Rates,
    turned,
)
from xrl_jax.graph import ops
from xrl_jax.libraries.onednn.c_api import library

Forms = Mapping[tuple[int, int, int], float]  # multiples by form


@dataclass(frozen=True, order=True)
class Sample:
    """One timing for calibration."""

    op_class: str
    flops: float
    bytes: float
    seconds: float
    form: tuple[int, int, int] = (0, 0, 0)  # see `form_of`


# What forms took on x86 CPUs in multiples of XLA's own, by operator and kind: medians over the
# regions of ResNeXt-50, SqueezeNet and BERT (jax 0.10.2). They say what to time first, no more.
# `python -m experiments.usual_forms` prints them anew.
_ON_CPU: Mapping[tuple[str, int], str] = {
    ("conv", 0): "onednn 0.69 overhang 0.73 half_columns 0.76 half_rows 0.77 im2col 0.81 "
    "winograd4 0.84 winograd3 0.95 taps 1.12 winograd2 1.3",
    ("conv", 1): "onednn_matmul 0.72 matmul 0.74 onednn_matmul_turned 0.75 matmul_turned 0.84 "
    "nhwc_matmul 0.84 onednn 0.86 overhang 0.86 nhwc 0.96",
    ("conv", 2): "nhwc_split4 0.23 nhwc_shifted 0.24 onednn 0.26 nhwc_split2 0.28 half_rows 0.31 "
    "rotated 0.32 half_columns 0.34 split2 0.38 split4 0.5 nhwc_split 0.5 shifted 0.59 split 0.6 "
    "taps 0.62 dense 0.66 overhang 0.79 nchw_shifted 0.8 im2col 0.89 nhwc 0.89 nchw 1.09",
    ("dot", 0): "flat 0.78 transposed 0.99 onednn 1.08 swapped 1.17 onednn_transposed 1.32",
    ("dot", 1): "loop 0.85 onednn 0.9 loop_transposed 0.9 onednn_transposed 0.93 swapped 1.04",
    ("reduce_sum", 0): "matmul 1.15",
    ("window_max", 0): "separable 0.35 shifted 0.45",
}
# Where oneDNN is there as a library: squeezenet and mobilenetv2; grouped convolutions between
# these (depthwise, 0.03) and ResNeXt-50's, products as in BERT.
_BY_LIBRARY: Mapping[tuple[str, int], str] = {
    ("conv", 0): "winograd4 0.2 winograd3 0.22 winograd2 0.27 onednn 0.41",
    ("conv", 1): "onednn_matmul 0.35 onednn_matmul_turned 0.35 onednn 0.38",
    ("conv", 2): "onednn 0.1",
    ("dot", 0): "onednn 0.9 onednn_transposed 0.9",
}


# A quarter of a form's timings are below this share of their median: so much better may it be here.
_DOUBT = 0.75
_PASSES = 3  # of a sum of two arrays
_LEAST_PER_BYTE = 1e-13  # seconds; where all samples are too small to tell


def usual_forms(backend: str) -> Forms:
    """Multiples of XLA's own form that forms take by experience on a backend, by `form_of`."""
    found: dict[tuple[int, int, int], float] = {}
    tables = []
    if backend == "cpu":
        tables = [_ON_CPU] if library() is None else [_ON_CPU, _BY_LIBRARY]
    for (op, kind), text in (row for table in tables for row in table.items()):
        words, spec = text.split(), ops.OPS[op]
        for name, multiple in zip(words[::2], words[1::2], strict=True):
            found[spec.code, kind, spec.lowerings.index(name)] = float(multiple)
    return {turned(at): m for at, m in found.items() if at[0] == ops.OPS["conv"].code} | found


def calibrate(
    samples: Sequence[Sample],
    rates: Rates = DEFAULT_RATES,
    usual: Forms = MappingProxyType({}),
) -> Rates:
    """Rates fitted to timings, class by class; their order does not matter, to the last bit.

    A class with fewer than four samples keeps its rates. Where a class computes (conv, dot) flops
    decide: the rate the faster quarter of its samples reaches. Elsewhere an overhead and a
    bandwidth are fitted, which for elementwise loops is an overhead for each of the three passes of
    a sum. A form that was timed has the median of its multiples of that; one that was timed in
    another layout has those; any other the `usual` multiple of what XLA's own form has, as far as
    other kinds bear that out. All but XLA's have the benefit of the doubt.
    """
    samples = sorted(samples)
    flop_rate, bandwidth = dict(rates.flop_rate), dict(rates.bandwidth)
    overhead, pass_overhead = dict(rates.overhead), rates.pass_overhead
    for c in CLASSES:
        mine = [s for s in samples if s.op_class == c and s.seconds > 0]
        if len(mine) < 4:
            continue
        if c in ("conv", "dot"):
            flop_rate[c] = float(np.quantile([s.flops / s.seconds for s in mine], 0.75))
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
        multiples.setdefault(s.form, []).append(s.seconds / expected)
    timed = {at: float(np.median(m)) for at, m in multiples.items()}
    form = _untimed_forms({turned(at): m for at, m in timed.items()} | timed, usual)
    form = {at: m * _DOUBT if at[2] else m for at, m in form.items()}
    return Rates(flop_rate, bandwidth, overhead, rates.scale, form, pass_overhead)


def _untimed_forms(timed: Forms, usual: Forms) -> dict[tuple[int, int, int], float]:
    """Multiples of forms that were timed, and what follows from these for others. XLA's own form
    takes what it takes in other kinds of the operator: or a change of kind would seem to gain. And
    no form is as much faster in another kind as its `usual` multiple alone would have it: where it
    was timed it took more.
    """
    by_name = defaultdict(list)  # of each form of an operator, in all kinds
    for (op, _, i), multiple in timed.items():
        by_name[op, i].append(multiple)
    own = {op: float(np.median(m)) for (op, i), m in by_name.items() if i == 0}
    found = {**{(op, k, 0): m for op, m in own.items() for k in range(KINDS)}, **timed}
    for (op, kind, i), multiple in usual.items():
        guess = multiple * found.get((op, kind, 0), 1.0)
        found.setdefault((op, kind, i), max(guess, min(by_name.get((op, i), ()), default=0.0)))
    return found


def _line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds of overhead and bytes per second: the line through the samples whose relative errors
    have the least squares, neither of the two negative.
    """
    seconds = np.array([s.seconds for s in samples])
    moved = np.array([s.bytes for s in samples])
    (start, per_byte), _ = nnls(
        np.stack([1 / seconds, moved / seconds], axis=1), np.ones(len(samples))
    )
    return float(start), float(1 / max(per_byte, _LEAST_PER_BYTE))


def sceptical(costs: CostTable) -> CostTable:
    """The table with the doubt turned round: forms that were not timed are as much dearer than
    usual as they are cheaper there. What seems to be fast by the one is worth a timing, what does
    by the other is fast as far as that is known.
    """
    return replace(costs, form=costs.form.at[..., 1:].multiply(_DOUBT**-2))


def varied(costs: CostTable, key: jax.Array, *, spread: float) -> CostTable:
    """The table as another machine might correct it: each correction times a log-normal factor.

    Args:
      spread: standard deviation of the factors' logarithms.
    """
    return replace(
        costs, scale=costs.scale * jnp.exp(spread * jax.random.normal(key, costs.scale.shape))
    )


def correct(
    rates: Rates, shares: Sequence[Mapping[str, float]], measured: Sequence[float]
) -> Rates:
    """Scales, times what they were, that bring predicted sums to the times of whole programs.

    Minimises sum_p (sum_c k_c share_pc / t_p - 1)^2 + 0.1 sum_c (k_c - mean)^2 for the changes k_c,
    a ridge towards one common factor, so that few programs cannot set one against another.

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
    ridge = 0.1
    a = np.vstack([x, np.sqrt(ridge) * np.eye(len(used))])
    b = np.concatenate([np.ones(len(t)), np.sqrt(ridge) * np.full(len(used), common)])
    change = np.clip(np.linalg.lstsq(a, b, rcond=None)[0], 0.2 * common, 5 * common)
    scales = {c: rates.scale[c] * float(k) for c, k in zip(used, change, strict=True)}
    return replace(rates, scale=dict(rates.scale) | scales)
