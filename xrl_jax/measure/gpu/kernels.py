"""The kernels that a compiled module launches, read from XLA's own texts.

XLA writes two texts beside the module: its sequence of thunks (a thunk is one launch or a container
of launches) and the instruction that each thunk comes from.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from xrl_jax.libraries.triton.naming import ProductWork, Work, product_work_in, work_in
from xrl_jax.measure.gpu.hlo import Instruction, Module, Shape

_THUNK = re.compile(r"^( *)(\d+): k(\w+)")
_METADATA = re.compile(
    r'profile_annotation: "([^"]*)"\s*(?:thunk_id: (\d+)\s*)?\}\s*thunk_kind: "k(\w+)"'
)
# Thunks that launch nothing on the device.
_HOST_ONLY = {"Sequential", "WaitForStreams", "HostSend", "HostRecv"}
_PRODUCTS = {"Gemm", "CublasLtMatmul"}
_FUSIONS = {"Kernel", "CustomKernel"}
_COPIES = {"Copy", "Memzero", "Memset32BitValue"}
_ALGORITHM = re.compile(r"algorithm\"?[=:]\"?(?:ALG_)?dot_(\w+)", re.IGNORECASE)
_TYPES = {"f16": "float16", "bf16": "bfloat16", "f64": "float64", "s8": "int8"}


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, or a convolution seen as one.

    Attributes:
      batch, m, n, k: there are `batch` products of [m, k] and [k, n].
      dtype: the type in which the hardware multiplies, as a key of `Gpu.rates`.
      passes: how many products of that type make one.
      tile: rows and columns that a multiprocessor computes at a time, without splitting the summed
        dimension; None where the library chooses.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    passes: int = 1
    tile: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
      name: of the instruction that it computes.
      kind: "conv", "product", "attention", "reduce", "loop", "copy" or "call" (of any other
        library).
      bytes: of its operands and results.
      times: how often it runs in a call of the program.
      graph: number of the CUDA graph that holds it; 0 where the host launches it.
      xla_seconds: XLA's own prediction; None where it makes none.
      products: what it multiplies, one after the other.
    """

    name: str
    kind: str
    bytes: int
    times: int = 1
    graph: int = 0
    xla_seconds: float | None = None
    products: tuple[Product, ...] = ()


def read_kernels(module: Module, thunks: str, metadata: str) -> list[Kernel]:
    """Return the kernels of a module in the order of their launches.

    Args:
      thunks: XLA's `thunk_sequence_after_thunk_passes`.
      metadata: its `thunk_metadata`.
    """
    source = {
        int(number or 0): name
        for name, number, kind in _METADATA.findall(metadata)
        if kind not in ("CommandBuffer", "Sequential")
    }
    return [
        _kernel(module, kind, source.get(number, ""), times, graph)
        for number, kind, times, graph in _launches(module, thunks.splitlines(), source)
    ]


def _launches(
    module: Module, lines: Sequence[str], source: Mapping[int, str]
) -> Iterator[tuple[int, str, int, int]]:
    """Yield the number, the kind, the repetitions and the CUDA graph of each launch.

    All branches of a conditional count.
    """
    outer: list[tuple[int, int]] = []  # (indentation, repetitions) of the loops around a line
    graphs, graph_indent = 0, -1
    for line in lines:
        match = _THUNK.match(line)
        if match is None:
            continue
        indent, number, kind = len(match.group(1)), int(match.group(2)), match.group(3)
        while outer and indent <= outer[-1][0]:
            outer.pop()
        if indent <= graph_indent:
            graph_indent = -1
        if kind == "CommandBuffer":
            graphs, graph_indent = graphs + 1, indent
        elif kind == "While":
            turns = _turns(module, source.get(number, ""))
            outer.append((indent, turns * (outer[-1][1] if outer else 1)))
        elif kind not in _HOST_ONLY and kind != "Conditional":
            times = outer[-1][1] if outer else 1
            yield number, kind, times, graphs if graph_indent >= 0 else 0


def _turns(module: Module, loop: str) -> int:
    """Return how often a loop runs; 1 where XLA does not know."""
    instruction = module.by_name.get(loop)
    known = {} if instruction is None else instruction.settings.get("known_trip_count", {})
    return int(known.get("n", 1))


def _kernel(module: Module, kind: str, name: str, times: int, graph: int) -> Kernel:
    instruction = module.by_name.get(name)
    if instruction is None:
        return Kernel(name or kind, "copy" if kind in _COPIES else "call", 0, times, graph)
    operands = dict.fromkeys(instruction.operands)  # each is read once
    arrays = [s for operand in operands for s in module.by_name[operand].shapes[:1]]
    results = [s for s in instruction.shapes if not _is_scratch(s)]
    moved = sum(s.bytes for s in [*arrays, *results])
    inside = module.called(instruction)
    products: tuple[Product, ...] = ()
    if kind == "Convolution":
        what, products = "conv", (_convolution(module, instruction),)
    elif kind in _PRODUCTS:
        what, products = "product", (_library_product(module, instruction),)
    elif dot := next((i for i in inside if i.opcode == "dot"), None):
        what, products = "product", (_dot(module, dot),)
    elif instruction.opcode == "custom-call" and (own := work_in(instruction.rest)):
        what, products = "attention", _attention(own)
    elif instruction.opcode == "custom-call" and (own := product_work_in(instruction.rest)):
        what, products = "product", (_own_product(own),)
    elif kind in _COPIES:
        what = "copy"
    elif kind not in _FUSIONS:
        what = "call"
    else:
        what = "reduce" if any(i.opcode == "reduce" for i in inside) else "loop"
    return Kernel(name, what, moved, times, graph, _predicted(instruction), products)


def _attention(work: Work) -> tuple[Product, ...]:
    batch, rows, columns, summed, features = work.sizes
    scores = Product(batch, rows, columns, summed, work.dtype)
    return (*[scores] * work.times, Product(batch, rows, features, columns, work.dtype))


def _own_product(work: ProductWork) -> Product:
    tile = work.tile_rows, work.tile_columns
    return Product(1, work.rows, work.columns, work.summed, work.dtype, tile=tile)


def _is_scratch(shape: Shape) -> bool:
    return shape.dtype in ("u8", "s8") and len(shape.dims) == 1


def _predicted(instruction: Instruction) -> float | None:
    """Return XLA's predicted seconds: by its model of tiles where it has one."""
    costs = {c["name"]: c["exec_time_us"] for c in instruction.settings.get("reification_cost", ())}
    found = costs.get("indexing-cost-model", costs.get(""))
    return None if found is None else 1e-6 * float(found)


def _multiplied(text: str, dtype: str) -> tuple[str, int]:
    """Return the type in which the hardware multiplies arrays of `dtype`, and in how many passes,
    given the text of an instruction.
    """
    if dtype != "f32":
        return _TYPES.get(dtype, "float32"), 1
    algorithm = _ALGORITHM.search(text)
    words = algorithm.group(1).lower().split("_") if algorithm else []
    if words:
        last = words[-1]
        passes = int(last[1:]) if last[:1] == "x" and last[1:].isdigit() else 1
        return {"bf16": "bfloat16", "tf32": "tf32"}.get(words[0], "float32"), passes
    highest = re.search(r"highest", text.partition("metadata=")[0] + text.partition("backend")[2])
    return ("float32", 1) if highest or "HIGHEST" in text else ("tf32", 1)


def _dot(module: Module, dot: Instruction) -> Product:
    left, right = (module.shape_of(name) for name in dot.operands[:2])
    return _product_of(
        left,
        right,
        (dot.numbers("lhs_contracting_dims"), dot.numbers("lhs_batch_dims")),
        dot.numbers("rhs_contracting_dims") + dot.numbers("rhs_batch_dims"),
        dot.rest,
    )


def _library_product(module: Module, call: Instruction) -> Product:
    left, right = (module.shape_of(name) for name in call.operands[:2])
    numbers = call.settings.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})

    def dims(name: str) -> tuple[int, ...]:
        return tuple(map(int, numbers.get(name, ())))

    contracted = dims("lhs_contracting_dimensions"), dims("lhs_batch_dimensions")
    of_right = dims("rhs_contracting_dimensions") + dims("rhs_batch_dimensions")
    return _product_of(left, right, contracted, of_right, call.rest)


def _product_of(
    left: Shape,
    right: Shape,
    of_left: tuple[tuple[int, ...], tuple[int, ...]],
    of_right: tuple[int, ...],
    text: str,
) -> Product:
    """Return the product of two arrays.

    Args:
      of_left: contracted and batch dimensions of the left array.
      of_right: both kinds of dimensions of the right array.
      text: of the instruction, which may state the precision.
    """

    def size(shape: Shape, dims: Sequence[int]) -> int:
        return Shape("", tuple(shape.dims[d] for d in dims)).size

    k, batch = (size(left, dims) for dims in of_left)
    n = right.size // max(size(right, of_right), 1)
    return Product(batch, left.size // max(k * batch, 1), n, k, *_multiplied(text, left.dtype))


def _convolution(module: Module, call: Instruction) -> Product:
    out, kernel = call.shapes[0], module.shape_of(call.operands[1])
    groups = int(call.attribute("feature_group_count") or 1)
    labels = call.attribute("dim_labels")  # such as b01f_o01i->b01f
    features = out.dims[labels.partition("->")[2].index("f")]
    k = kernel.size // max(features, 1)
    return Product(
        groups,
        out.size // max(features, 1),
        features // groups,
        k,
        *_multiplied(call.rest, kernel.dtype),
    )
