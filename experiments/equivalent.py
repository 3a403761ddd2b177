"""Proof that two ONNX networks compute the same, by equality saturation of both in one e-graph.

  python -m experiments.equivalent a.onnx b.onnx
  python -m experiments.equivalent a.onnx b.onnx --input_shape=image:1,3,224,224 --proof=proof.txt

prints whether all results are proven equal, the rewrites that show it, and by how much the networks
differ on random inputs. Rules hold for real numbers: what is proven equal may differ in rounding.
What is not proven may be equal all the same; higher limits may show it.

Exit status: 0 if the networks are proven equal, 1 if not, 2 if a file or flag is wrong, 130 after
Ctrl-C, which prints what was proven so far.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

import xrl_jax
from experiments import targets
from experiments.onnx_flags import define_onnx_flags, open_inputs
from experiments.targets import ConfigError
from xrl_jax.accept.samples import concrete
from xrl_jax.egraph.equivalence import Equivalence
from xrl_jax.egraph.limits import Iteration, Stop
from xrl_jax.frontends.onnx import OnnxError
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.program import Program

_MOST_LINES = 20  # of the proof that are printed


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    to: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_float("seconds", 60.0, "Time limit of the saturation.", lower_bound=0.0, **to)
    flags.DEFINE_integer("nodes", 20_000, "Most e-nodes.", lower_bound=1, **to)
    flags.DEFINE_integer("iterations", 30, "Most iterations.", lower_bound=1, **to)
    flags.DEFINE_integer(
        "merging", 1, "Iterations in which rules merge two operators.", lower_bound=0, **to
    )
    flags.DEFINE_list("rules", [], "Rules or families; -name excludes one; empty: all.", **to)
    flags.DEFINE_list("assume", [], "Assumptions about values, such as finite.", **to)
    flags.DEFINE_string("proof", "", "File for the whole proof.", **to)
    define_onnx_flags(values)


def load(path: str, values: flags.FlagValues) -> Program:
    """Read an ONNX file.

    Raises:
      ConfigError, OnnxError: as for `targets.from_onnx_file`.
    """
    given = {name: dict(pairs) for name, pairs in open_inputs(values).items()}
    target = targets.from_onnx_file(path, **given)
    return xrl_jax.from_jax(target.fn, *target.args)


def differences(one: Program, other: Program) -> list[float]:
    """Return for each result the largest difference on random inputs, as a share of the largest
    finite value; infinite where only one of them is NaN or infinite.
    """
    inputs = concrete(one, one.in_avals)
    ours, theirs = (
        [np.asarray(x, np.float64) for x in jax.tree.leaves(jax.jit(p)(*inputs))]
        for p in (one, other)
    )
    found = []
    for a, b in zip(ours, theirs, strict=True):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        size = float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) or 1.0
        apart = np.abs(np.subtract(a, b, where=~same, out=np.zeros_like(a)))
        found.append(float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0)) / size)
    return found


def report(found: Equivalence, differ: Sequence[float]) -> list[str]:
    """Return the lines that say what was found."""
    lines = [str(found)]
    if len(found.outputs) > 1:
        for n, equal in enumerate(found.outputs):
            lines.append(f"  result {n}: {'equal' if equal else 'not proven'}")
    lines.append(f"on random inputs they differ by {max(differ, default=0.0):.1e} of the largest")
    proof = str(found.proof).splitlines() if any(found.outputs) else []
    lines += proof[:_MOST_LINES]
    if len(proof) > _MOST_LINES:
        lines.append(f"and {len(proof) - _MOST_LINES} more (--proof=FILE writes all)")
    return lines


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    if len(argv) != 3:
        print("error: give two ONNX files", file=sys.stderr)
        return 2
    clock = Stopwatch(0.0)

    def tell(i: Iteration) -> None:
        text = f"[{clock.elapsed:4.0f} s] {i.nodes:,} e-nodes in {i.classes:,} classes"
        print(text, file=sys.stderr)

    try:
        one, other = (load(path, values) for path in argv[1:])
        found = xrl_jax.equivalent(
            one,
            other,
            values.rules or None,
            assume=values.assume,
            nodes=values.nodes,
            iterations=values.iterations,
            seconds=values.seconds,
            merging=values.merging,
            tell=tell,
        )
        differ = differences(one, other)
    except (ConfigError, OnnxError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(report(found, differ)))
    if not found and "finite" not in values.assume:
        print("with --assume=finite, rules are used too that hold where all values are finite")
    if values.proof:
        Path(values.proof).write_text(f"{found}\n{found.proof}\n", encoding="utf-8")
    if found.saturation.stop is Stop.INTERRUPTED:
        return 130
    return 0 if found else 1


if __name__ == "__main__":
    define_flags()
    app.run(main)
