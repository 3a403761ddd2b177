"""Elementwise functions of float32 vectors, as LLVM IR.

Source: exp, log, tanh, erf and erfc are reduced and approximated as in Cephes (S. Moshier, single
precision: expf, logf, tanhf, erff, erfcf), from which the coefficients are taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from xrl_jax.libraries.cephes import ERFC_FAR, ERFC_NEAR
from xrl_jax.libraries.onednn.code import BOOLS, INTEGERS, SUFFIX, VECTOR, WIDTH, Code, constant
from xrl_jax.libraries.onednn.spec import (
    COMPARISONS,
    Binary,
    Clip,
    Instruction,
    Map,
    Repeat,
    Reshape,
    Scale,
)


def only(out: Code, x: str, mask: str, other: float) -> str:
    """Return `x` where the mask is set, `other` elsewhere."""
    return out.add(f"select {BOOLS} {mask}, {VECTOR} {x}, {VECTOR} {constant(other)}")


def combined(out: Code, kind: str, a: str, b: str) -> str:
    """Return the "sum", the larger ("max") or the smaller ("min") of two; NaN where one is NaN."""
    if kind == "sum":
        return out.add(f"fadd contract {VECTOR} {a}, {b}")
    name = {"max": "maximum", "min": "minimum"}[kind]
    return out.add(f"call nsz {VECTOR} @llvm.{name}.{SUFFIX}({VECTOR} {a}, {VECTOR} {b})")


def clipped(out: Code, bounds: Clip, x: str) -> str:
    """Clip a vector; NaN stays NaN.

    The comparison and selection compile to one instruction for each bound, where `combined` takes
    three.
    """
    if bounds.low is not None:
        x = _less(out, x, constant(bounds.low), constant(bounds.low), x)
    if bounds.high is not None:
        x = _less(out, constant(bounds.high), x, constant(bounds.high), x)
    return x


def folded(out: Code, kind: str, x: str) -> str:
    """Reduce a vector and return the result in all of its elements."""
    if kind == "sum":
        call = f"call reassoc float @llvm.vector.reduce.fadd.{SUFFIX}(float -0.0, {VECTOR} {x})"
    else:
        name = {"max": "fmaximum", "min": "fminimum"}[kind]
        call = f"call nsz float @llvm.vector.reduce.{name}.{SUFFIX}({VECTOR} {x})"
    return out.splat(out.add(call))


def computed(out: Code, i: Instruction, xs: Sequence[str]) -> str:
    """Return the result of an elementwise operator."""
    match i.op:
        case Reshape() | Repeat():
            return xs[0]
        case Clip() as bounds:
            return clipped(out, bounds, xs[0])
        case Scale(by):
            return curve(out, "mul", [xs[0], constant(by)])
        case Map(kind, scalars):
            if kind == "integer_pow":
                assert scalars[1] is not None
                return power(out, xs[0], int(scalars[1]))
            rest = iter(xs)
            operands = [next(rest) if n is None else constant(n) for n in scalars]
            return curve(out, kind, operands)
        case Binary(kind):
            return curve(out, kind, xs)
    raise AssertionError(f"{i.op} is not elementwise")


def curve(out: Code, kind: str, xs: Sequence[str]) -> str:
    """Return the result of the function with this name in lax."""
    if kind in ("max", "min"):
        return combined(out, kind, *xs)
    if kind in _ARITHMETIC:
        return out.add(f"{_ARITHMETIC[kind]} contract {VECTOR} {xs[0]}, {xs[1]}")
    if kind in COMPARISONS:
        test = out.add(f"fcmp {_PREDICATES[kind]} {VECTOR} {xs[0]}, {xs[1]}")
        return out.add(f"uitofp {BOOLS} {test} to {VECTOR}")
    if kind in _CALLS:
        return _call(out, _CALLS[kind], xs[0])
    return _CURVES[kind](out, *xs)


def power(out: Code, x: str, exponent: int) -> str:
    """Return x raised to an integer power."""
    found, square, left = constant(1.0), x, abs(exponent)
    while left:
        if left & 1:
            found = square if found == constant(1.0) else _mul(out, found, square)
        left >>= 1
        square = _mul(out, square, square) if left else square
    return found if exponent >= 0 else _div(out, constant(1.0), found)


_ARITHMETIC = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_PREDICATES = {k: "une" if k == "ne" else f"o{k}" for k in COMPARISONS}
_CALLS = {"sqrt": "sqrt", "abs": "fabs", "floor": "floor", "ceil": "ceil"}


def _call(out: Code, name: str, *xs: str) -> str:
    return out.add(f"call {VECTOR} @llvm.{name}.{SUFFIX}({', '.join(f'{VECTOR} {x}' for x in xs)})")


def _mul(out: Code, a: str, b: str) -> str:
    return out.add(f"fmul contract {VECTOR} {a}, {b}")


def _div(out: Code, a: str, b: str) -> str:
    return out.add(f"fdiv {VECTOR} {a}, {b}")


def _sub(out: Code, a: str, b: str) -> str:
    return out.add(f"fsub contract {VECTOR} {a}, {b}")


def _fma(out: Code, a: str, b: str, c: str) -> str:
    return _call(out, "fmuladd", a, b, c)


def _neg(out: Code, x: str) -> str:
    return out.add(f"fneg {VECTOR} {x}")


def _less(out: Code, a: str, b: str, yes: str, no: str) -> str:
    """Return `yes` where a < b, else `no`."""
    test = out.add(f"fcmp olt {VECTOR} {a}, {b}")
    return out.add(f"select {BOOLS} {test}, {VECTOR} {yes}, {VECTOR} {no}")


def _polynomial(out: Code, x: str, coefficients: Sequence[float]) -> str:
    """Return the value of a polynomial; coefficients of the highest power first."""
    return functools.reduce(
        lambda y, c: _fma(out, y, x, constant(c)), coefficients[1:], constant(coefficients[0])
    )


def _two_to(out: Code, n: str) -> str:
    """Return 2^n for a vector of integers n, where float32 can represent that."""
    biased = out.add(f"add {INTEGERS} {n}, {_integers(127)}")
    bits = out.add(f"shl {INTEGERS} {biased}, {_integers(23)}")
    return out.add(f"bitcast {INTEGERS} {bits} to {VECTOR}")


def _integers(x: int) -> str:
    return "<" + ", ".join([f"i32 {x}"] * WIDTH) + ">"


def _exp(out: Code, x: str) -> str:
    """Return exp as 2^n e^r with |r| <= ln 2 / 2."""
    x = clipped(out, Clip(-104.0, 89.0), x)
    # Adding `_SHIFT` rounds to an integer, which is then in the last bits.
    shifted = _fma(out, x, constant(1.44269504088896341), constant(_SHIFT))
    n = out.add(f"fsub {VECTOR} {shifted}, {constant(_SHIFT)}")
    bits = out.add(f"bitcast {VECTOR} {shifted} to {INTEGERS}")
    whole = out.add(f"sub {INTEGERS} {bits}, {_integers(_SHIFT_BITS)}")
    r = _fma(out, n, constant(-0.693359375), x)
    r = _fma(out, n, constant(2.12194440e-4), r)
    p = _polynomial(out, r, _EXP)
    y = out.add(f"fadd {VECTOR} {_fma(out, _mul(out, r, r), p, r)}, {constant(1.0)}")
    # Multiply by half of the power at a time: the whole power may overflow or underflow.
    half = out.add(f"ashr {INTEGERS} {whole}, {_integers(1)}")
    rest = out.add(f"sub {INTEGERS} {whole}, {half}")
    return _mul(out, _mul(out, y, _two_to(out, half)), _two_to(out, rest))


_SHIFT, _SHIFT_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23, and its bits in float32
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def _tanh(out: Code, x: str) -> str:
    """Return tanh: an odd polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere."""
    a = _call(out, "fabs", x)
    z = _mul(out, x, x)
    small = _fma(out, _mul(out, _polynomial(out, z, _TANH), z), x, x)
    e = _exp(out, _mul(out, a, constant(2.0)))
    above = out.add(f"fadd {VECTOR} {e}, {constant(1.0)}")
    large = _sub(out, constant(1.0), _div(out, constant(2.0), above))
    signed = _less(out, x, constant(0.0), _neg(out, large), large)
    return _less(out, a, constant(0.625), small, signed)


_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def _logistic(out: Code, x: str) -> str:
    e = _exp(out, _neg(out, x))
    below = out.add(f"fadd {VECTOR} {e}, {constant(1.0)}")
    return _div(out, constant(1.0), below)


def _erf_near(out: Code, x: str) -> str:
    return _mul(out, x, _polynomial(out, _mul(out, x, x), _ERF))


def _erfc_far(out: Code, a: str) -> str:
    """Return erfc of values from 1 on: e^-x^2 / x times a polynomial in 1 / x^2."""
    q = _div(out, constant(1.0), a)
    y = _mul(out, q, q)
    p = _less(out, a, constant(2.0), _polynomial(out, y, ERFC_NEAR), _polynomial(out, y, ERFC_FAR))
    e = _exp(out, _neg(out, _mul(out, a, a)))
    return _mul(out, _mul(out, e, q), p)


def _erf(out: Code, x: str) -> str:
    a = _call(out, "fabs", x)
    far = _sub(out, constant(1.0), _erfc_far(out, clipped(out, Clip(1.0), a)))
    signed = _less(out, x, constant(0.0), _neg(out, far), far)
    return _less(out, a, constant(1.0), _erf_near(out, x), signed)


def _erfc(out: Code, x: str) -> str:
    a = _call(out, "fabs", x)
    far = _erfc_far(out, clipped(out, Clip(1.0), a))
    transposed = _less(out, x, constant(0.0), _sub(out, constant(2.0), far), far)
    near = _sub(out, constant(1.0), _erf_near(out, x))
    return _less(out, a, constant(1.0), near, transposed)


_ERF = (
    7.853861353153693e-5,
    -8.010193625184903e-4,
    5.188327685732524e-3,
    -2.685381193529856e-2,
    1.128358514861418e-1,
    -3.761262582423300e-1,
    1.128379165726710e0,
)


def _select(out: Code, test: str, no: str, yes: str) -> str:
    is_true = out.add(f"fcmp une {VECTOR} {test}, {constant(0.0)}")
    return out.add(f"select {BOOLS} {is_true}, {VECTOR} {yes}, {VECTOR} {no}")


_CURVES: dict[str, Callable[..., str]] = {
    "exp": _exp,
    "tanh": _tanh,
    "logistic": _logistic,
    "erf": _erf,
    "erfc": _erfc,
    "neg": _neg,
    "square": lambda out, x: _mul(out, x, x),
    "rsqrt": lambda out, x: _div(out, constant(1.0), _call(out, "sqrt", x)),
    "select_n": _select,
}
