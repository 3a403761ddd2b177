"""Number systems in which a rule is tested: a prime field, the ordered integers, and float64.

A polynomial identity that is false over the rationals is false at a random point of a large prime
field with probability at least 1 - degree / prime (Schwartz 1980, Zippel 1979). In the field a
number is represented modulo two primes, p = 2 q + 1 and q: exp x is g^(x mod q) mod p with g of
order q, so that exp(a + b) = exp a exp b holds exactly (the idea of Mirage, Wu et al. 2024).
Functions about which nothing is known are keyed hashes. Maximum and minimum are those of a random
total order, which is unrelated to the arithmetic. Rules that need both order and arithmetic are
tested over the integers, where an increasing function is a random increasing function. All
arithmetic except that of float64 is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

P = 2147483579  # with (P - 1) / 2 = Q prime
Q = 1073741789
G = 4  # a square, hence of order Q
_PAIR = np.dtype([("p", np.int64), ("q", np.int64)])
_INFINITE = 1 << 60  # stands for infinity among the integers
_HALF = (1 << 64) - 1

Value = Any  # an array of the domain's dtype


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(text: str, seed: int) -> np.uint64:
    number = seed * 0x9E3779B97F4A7C15
    for c in text.encode():
        number = (number ^ c) * 0x100000001B3
    return np.uint64(number & _HALF)


def _hashed(name: str, seed: int, *words: np.ndarray) -> np.ndarray:
    """Return the elementwise hash of words as uint64."""
    h: np.ndarray = np.full(np.broadcast_shapes(*(w.shape for w in words)), _key(name, seed))
    for word in words:
        h = _mix(h * np.uint64(31) + word.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019))
    return h


def power(base: np.ndarray, exponent: np.ndarray | int, prime: int) -> np.ndarray:
    """Return base^exponent mod prime, elementwise; 0^-1 is 0."""
    base = np.asarray(base, np.int64)
    exponent = np.broadcast_to(np.asarray(exponent, np.int64), base.shape) % (prime - 1)
    # For base 0 the result is 0, unless the reduced exponent is 0.
    result = np.ones(base.shape, np.int64)
    square = base % prime
    while exponent.size and exponent.max() > 0:
        result = np.where(exponent & 1, result * square % prime, result)
        square = square * square % prime
        exponent = exponent >> 1
    return result


class _Derived:
    """Operations derived from a domain's other operations; a domain may override them."""

    add: Any
    mul: Any
    sum: Any
    uninterpreted: Any

    def neg(self, a: Value) -> Value:
        return -a

    def sub(self, a: Value, b: Value) -> Value:
        return self.add(a, self.neg(b))

    def contract(self, a: Value, b: Value) -> Value:
        """Sum products over the last axis: [..., m, k], [..., n, k] -> [..., m, n]."""
        return self.sum(self.mul(a[..., :, None, :], b[..., None, :, :]), (-1,))

    def monotone(self, name: str, a: Value) -> Value:
        """Apply an increasing function of this name."""
        return self.uninterpreted(name, (a,))

    def rank(self, a: Value) -> np.ndarray:
        """Return keys by which the domain orders values."""
        return np.asarray(a)

    def truth(self, a: np.ndarray) -> Value:
        return np.asarray(a).astype(np.int64)

    def is_true(self, a: Value) -> np.ndarray:
        return np.asarray(a) != 0


@dataclass(frozen=True)
class Field(_Derived):
    """Pairs of residues modulo P and Q.

    If `exponential`, exp(a + b) = exp(a) exp(b); otherwise exp is a hash like any other function.
    """

    seed: int = 0
    exponential: bool = True
    dtype: np.dtype = field(default=_PAIR, init=False)

    def _pair(self, p: np.ndarray, q: np.ndarray) -> Value:
        out = np.empty(np.shape(p), _PAIR)
        out["p"], out["q"] = p % P, q % Q
        return out

    def variable(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Value:
        if dtype == "bool":
            bits = rng.integers(0, 2, shape)
            return self._pair(bits, bits)
        return self._pair(rng.integers(0, P, shape), rng.integers(0, Q, shape))

    def const(self, value: float) -> Value:
        if not math.isfinite(value):
            word = np.asarray(1 + int(value > 0) + 2 * int(value != value))
            return self.uninterpreted("infinite", (self._pair(word, word),))
        exact = Fraction(value)
        n, d = exact.numerator, exact.denominator
        return self._pair(
            np.asarray(n * pow(d, P - 2, P) % P), np.asarray(n * pow(d, Q - 2, Q) % Q)
        )

    def add(self, a: Value, b: Value) -> Value:
        return self._pair(a["p"] + b["p"], a["q"] + b["q"])

    def mul(self, a: Value, b: Value) -> Value:
        return self._pair(a["p"] * b["p"], a["q"] * b["q"])

    def neg(self, a: Value) -> Value:
        return self._pair(-a["p"], -a["q"])

    def div(self, a: Value, b: Value) -> Value:
        return self.mul(a, self._pair(power(b["p"], P - 2, P), power(b["q"], Q - 2, Q)))

    def sum(self, a: Value, axes: tuple[int, ...]) -> Value:
        return self._pair(a["p"].sum(axis=axes), a["q"].sum(axis=axes))

    def exp(self, a: Value) -> Value:
        other = self.uninterpreted("exp", (a,))
        return (
            self._pair(power(np.full(np.shape(a), G), a["q"], P), other["q"])
            if self.exponential
            else other
        )

    def uninterpreted(self, name: str, args: tuple[Value, ...]) -> Value:
        words = [w for a in args for w in (a["p"], a["q"])]
        h = _hashed(name, self.seed, *words)
        p = (h % np.uint64(P)).astype(np.int64)
        q = (_mix(h) % np.uint64(Q)).astype(np.int64)
        return self._pair(p, q)

    def rank(self, a: Value) -> np.ndarray:
        """Return random keys that order values; -inf has the smallest key, inf the largest."""
        h = _hashed("order", self.seed, a["p"], a["q"])
        low, high = self.const(-math.inf), self.const(math.inf)
        h = np.where(a == low, np.uint64(0), np.maximum(h, np.uint64(1)))
        return np.where(a == high, np.uint64(_HALF), h)

    def truth(self, a: np.ndarray) -> Value:
        bits = np.asarray(a).astype(np.int64)
        return self._pair(bits, bits)

    def is_true(self, a: Value) -> np.ndarray:
        return a["p"] != 0

    def disagreement(self, a: Value, b: Value) -> float:
        """Return 0 if all elements are equal, else 1."""
        # The second residue of an exponential is a hash that obeys no law, so only the first
        # residue is compared.
        same = a["p"] == b["p"] if self.exponential else a == b
        return 0.0 if np.all(same) else 1.0


@dataclass(frozen=True)
class Integers(_Derived):
    """Exact integers with their order; magnitudes of 2^60 or more count as infinite."""

    seed: int = 0
    dtype: np.dtype = field(default=np.dtype(np.int64), init=False)

    def _cut(self, a: np.ndarray) -> Value:
        return np.clip(a, -_INFINITE, _INFINITE)

    def variable(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Value:
        if dtype == "bool":
            return rng.integers(0, 2, shape)
        wide = int(rng.choice((3, 1000)))  # with the small range there are ties
        return rng.integers(0 if dtype.startswith("uint") else -wide, wide, shape)

    def const(self, value: float) -> Value:
        if math.isinf(value):
            return np.asarray(_INFINITE if value > 0 else -_INFINITE)
        if value != int(value):
            return self.uninterpreted("fraction", (np.asarray(int(value * 2**16)),))
        return np.asarray(int(value))

    def add(self, a: Value, b: Value) -> Value:
        endless = np.where(np.abs(a) >= _INFINITE, a, b)
        either = (np.abs(a) >= _INFINITE) | (np.abs(b) >= _INFINITE)
        return self._cut(np.where(either, endless, a + b))

    def mul(self, a: Value, b: Value) -> Value:
        small = np.abs(np.multiply(a, b, dtype=np.float64)) < _INFINITE / 2
        sign = np.sign(a) * np.sign(b) * _INFINITE
        return np.where(small, np.where(small, a, 0) * np.where(small, b, 0), sign)

    def div(self, a: Value, b: Value) -> Value:
        return self.uninterpreted("div", (a, b))

    def sum(self, a: Value, axes: tuple[int, ...]) -> Value:
        return self._cut(a.sum(axis=axes))

    def exp(self, a: Value) -> Value:
        return self.monotone("exp", a)

    def uninterpreted(self, name: str, args: tuple[Value, ...]) -> Value:
        return (_hashed(name, self.seed, *args) % np.uint64(19)).astype(np.int64) - 9

    def monotone(self, name: str, a: Value) -> Value:
        key = int(_key(name, self.seed) % np.uint64(1 << 20))
        slope, step, offset = 2 + key % 3, 2 + (key >> 4) % 3, (key >> 8) % 7 - 3
        return self._cut(slope * a + a // step + offset)

    def disagreement(self, a: Value, b: Value) -> float:
        """Return 0 if all elements are equal, else 1."""
        return 0.0 if np.array_equal(a, b) else 1.0


_EDGES = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -2.5, 1e-3, -20.0, 30.0])


@dataclass(frozen=True)
class Floats(_Derived):
    """Double or single precision; a cast to a narrower dtype rounds to that dtype."""

    seed: int = 0
    single: bool = False

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32 if self.single else np.float64)

    def variable(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Value:
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(np.float64)
        x = rng.normal(size=shape) * rng.choice([1.0, 1.0, 5.0])
        edge = rng.choice(_EDGES, size=shape)
        x = np.where(rng.random(shape) < 0.15, edge, x)
        return rounded(
            x if "float" in dtype else np.round(4 * np.abs(x) if dtype[0] == "u" else 4 * x), dtype
        )

    def const(self, value: float) -> Value:
        return np.asarray(value, self.dtype)

    def add(self, a: Value, b: Value) -> Value:
        return a + b

    def mul(self, a: Value, b: Value) -> Value:
        return a * b

    def div(self, a: Value, b: Value) -> Value:
        return a / b

    def sum(self, a: Value, axes: tuple[int, ...]) -> Value:
        return a.sum(axis=axes)

    def contract(self, a: Value, b: Value) -> Value:
        """Sum products over the last axis: [..., m, k], [..., n, k] -> [..., m, n].

        In single precision the order of the sum does not depend on the shapes; in double precision
        BLAS decides it.
        """
        if self.single:
            return np.einsum("...mk,...nk->...mn", a, b)
        return a @ np.swapaxes(b, -1, -2)

    def exp(self, a: Value) -> Value:
        return np.exp(a)

    def uninterpreted(self, name: str, args: tuple[Value, ...]) -> Value:
        known = _FLOAT_FUNCTIONS.get(name)
        if known is not None:
            return known(*args)
        with np.errstate(all="ignore"):
            bits = [np.asarray(np.round(a * 2**20), np.int64) for a in args]
        return (_hashed(name, self.seed, *bits) % np.uint64(1 << 20)) / float(1 << 18) - 2.0

    def truth(self, a: np.ndarray) -> Value:
        return np.asarray(a).astype(np.float64)

    def disagreement(self, a: Value, b: Value) -> float:
        """Return the largest error relative to max(|a|, 1), over elements where `a` is not NaN."""
        a, b = np.asarray(a), np.asarray(b)
        defined = ~np.isnan(a)
        if not np.any(defined):
            return 0.0
        a, b = a[defined], b[defined]
        endless = np.isinf(a) | ~np.isfinite(b)
        if np.any(endless & (a != b)):
            return math.inf
        a, b = a[~endless], b[~endless]
        return float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(a), initial=0.0), 1.0))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return float64 values rounded to values of `dtype`."""
    if dtype in ("float64", "complex64", "complex128", "extended"):
        return np.asarray(x, np.float64)
    if dtype == "bool":
        return (np.asarray(x) != 0).astype(np.float64)
    with np.errstate(all="ignore"):
        kind = (
            ml_dtypes.bfloat16
            if dtype == "bfloat16"
            else np.dtype(dtype if "2" not in dtype[-1:] or dtype.endswith("32") else "int8")
        )
        if "int" in dtype:
            x = np.trunc(np.nan_to_num(np.asarray(x, np.float64))).astype(np.int64)
        return np.asarray(x).astype(kind).astype(np.float64)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erfc, otypes=[np.float64])(x)


_FLOAT_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh,
    "sqrt": np.sqrt, "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt, "sin": np.sin, "cos": np.cos, "tan": np.tan, "abs": np.abs, "sign": np.sign,
    "floor": np.floor, "ceil": np.ceil, "erf": _erf, "erfc": _erfc, "pow": np.power,
    "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "rem": np.fmod, "atan2": np.arctan2,
}  # fmt: skip
INCREASING = (
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sqrt", "cbrt", "erf", "atan",
    "sinh", "asinh",
)  # fmt: skip
