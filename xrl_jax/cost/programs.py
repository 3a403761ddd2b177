"""Whole programs: compile options to try, jobs for the worker, and corrections of the cost table
from their timings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from xrl_jax.backends.hoist import split
from xrl_jax.cost.model import Oracle, price
from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.view import CORRECTED
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.hash import timing_key
from xrl_jax.graph.work import node_work
from xrl_jax.libraries import registry
from xrl_jax.measure.base import Job
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program, evaluate
from xrl_jax.runtime.compile_options import YNN
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.runtime.target_platform import target_platform

Options = tuple[tuple[str, str], ...]

# XLA's default leaves convolutions out of CUDA graphs, so that the host launches them one by one.
IN_ONE_GRAPH: Options = (
    (
        "xla_gpu_enable_command_buffer",
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,"
        "CONVOLUTION",
    ),
    ("xla_gpu_graph_min_graph_size", "1"),
)
# Parts of a sum are added by a second kernel.
SPLIT_K_OFF = ("xla_gpu_experimental_force_split_k", "1")
# For compiling without a GPU, where XLA cannot try how many parts are fastest and takes too many.
WITHOUT_TRYING: Options = (*IN_ONE_GRAPH, SPLIT_K_OFF)
# Compile options worth trying on each platform, the default first. On the CPU they decide which
# operators go to the YNNPACK library and which to XLA's own kernels; measured on single operators
# the two differ by a factor of up to 2 either way.
OPTION_SETS: Mapping[str, tuple[Options, ...]] = {
    "cpu": (
        (),
        ((YNN, ""),),
        ((YNN, "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),),
    ),
    "gpu": ((), IN_ONE_GRAPH, WITHOUT_TRYING),
}
# Base options may lose this share against none: launches from the host hide in a short program.
_OPTIONS_MAY_LOSE = 0.02
# Constants must gain this share, as they compile for longer, and again for other weights.
_CONSTANTS_MUST_GAIN = 0.05
_CONVOLVED = 0.2  # least share of the flops for constants to be tried


def base_options(platform: str) -> Options:
    """Return the compile options under which costs are recorded on a JAX platform."""
    return IN_ONE_GRAPH if platform == "gpu" else ()


def option_sets(target: Target) -> tuple[Options, ...]:
    """Return the compile options to try on a target."""
    return OPTION_SETS.get(target.platform, ((),))


def program_key(program: Program) -> tuple[str, ...]:
    """Return a timing key for each graph; programs whose timings differ have different keys."""
    return tuple(timing_key(*nodes_of(g)[:2]) for g in program.graphs)


def program_job(program: Program, options: Options = (), *, constants: bool = False) -> Job:
    """Return the program as a worker job, with weight-only work prepared beforehand.

    Args:
      constants: prepared weights are constants of the compiled code instead of arguments.
    """
    hoisted = split(lambda *flat: evaluate(program, 0, flat), program.in_avals, program.weights)
    inputs = [a for a, w in zip(program.in_avals, program.weights, strict=True) if not w]
    exported = registry.exported(hoisted.call, hoisted.avals, inputs)
    how = [f"constants={constants}", *(f"{k}={v}" for k, v in options)]
    key = timing_key([], (), extra=["program", *program_key(program), *how])
    n_constants = len(hoisted.avals) if constants else 0
    artifact, targets = bytes(exported.serialize()), registry.custom_calls(exported)
    free = len(hoisted.avals) - n_constants if target_platform() == "gpu" else 0
    return Job(key, artifact, options, constants=n_constants, custom_calls=targets, any_layout=free)


def job_or_failure(program: Program, options: Options, *, constants: bool) -> Job | Timing:
    """Return the program's job, or a failed timing that says why there is none."""
    try:
        with plain_ctrl_c():
            return program_job(program, options, constants=constants)
    except Exception as error:  # host callbacks and the like cannot be exported
        return Timing.without("failed", f"{type(error).__name__}: {error}")


def choose_constants(oracle: Oracle, program: Program) -> None:
    """Let the oracle time weights as constants of the compiled code if the original runs faster so.

    XLA:CPU passes a convolution with a constant kernel to another library than one whose kernel is
    an argument; matrix products are computed alike, and hundreds of megabytes of constants take a
    quarter of a minute to compile. So only programs with enough of their work in convolutions are
    tried. The timing is kept in the store, so that the choice is the same the next time. On GPUs
    only layouts differ, and weights that are arguments have those that XLA wants.
    """
    if oracle.target.platform == "gpu" or _convolved(program) < _CONVOLVED:
        return
    try:
        as_constants = program_job(program, oracle.options, constants=True)
        if not as_constants.constants:
            return
        as_arguments = program_job(program, oracle.options)
    except Exception:  # a program that cannot be exported is not timed in the worker at all
        return
    # The worker keeps its references compiled, and will need this one again if constants pay.
    timing = oracle.time_against(as_arguments, as_constants)
    gains = timing.relative is not None and 1 / timing.relative < 1 - _CONSTANTS_MUST_GAIN
    oracle.constants = gains


def choose_options(oracle: Oracle, program: Program) -> None:
    """Let the oracle price under the base options of its platform if the original runs under them,
    and no slower. The timing is kept in the store.

    On GPUs an operator is then timed as a kernel of a CUDA graph. Where a driver refuses such
    graphs, all is timed without options.
    """
    base = base_options(oracle.target.platform)
    if oracle.options or not base:
        return
    plain, optioned = (job_or_failure(program, o, constants=oracle.constants) for o in ((), base))
    if isinstance(plain, Job) and isinstance(optioned, Job):
        timing = oracle.time_against(optioned, plain)
        if timing.relative is not None and timing.relative < 1 + _OPTIONS_MAY_LOSE:
            oracle.options = base


def _convolved(program: Program) -> float:
    """Return the share of convolutions in a program's flops."""
    there, total = 0.0, 1.0
    for graph, count in zip(program.graphs, program.counts, strict=True):
        nodes, _, _ = nodes_of(graph)
        for node in nodes:
            flops, _ = node_work(node, [nodes[a] for a in node.args])
            total += count * flops
            there += count * flops * (node.op == "conv")
    return there / total


_shares = engine_jit(lambda costs, graph: costs.shares(graph))


def learn_from(
    oracle: Oracle, timed: Sequence[tuple[Program, Timing | None]], original: Program
) -> None:
    """Correct the cost table by timings of whole programs and of the original in turn with them."""
    there = [(program, t) for program, t in timed if t is not None and t.ok]
    known = [(program, t.seconds) for program, t in there]
    known += [(original, t.seconds / t.relative) for _, t in there if t.relative][:1]
    costs = oracle.costs
    oracle.correct([shares(program, costs) for program, _ in known], [s for _, s in known])


def shares(program: Program, costs: CostTable) -> dict[str, float]:
    """Return the predicted seconds of one run of a program, by the corrections in `CORRECTED`."""
    each = [np.asarray(_shares(costs, price(costs, graph)[0])) for graph in program.graphs]
    total = np.asarray(program.counts) @ np.stack(each)
    return {c: float(s) for c, s in zip(CORRECTED, total, strict=True) if s > 0}
