"""Random inputs have the right type and are valid; the HLO hash depends on the program only, not on
its source.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.measure.inputs import hlo_hash, random_input

FLOATS = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_fill_the_interval_from_minus_one_to_one(dtype):
    values = np.asarray(random_input(jax.ShapeDtypeStruct((50, 20), dtype)), np.float32)
    assert -1.0 <= values.min() < -0.8 and 0.8 < values.max() <= 1.0


def test_inputs_differ_by_seed_alone():
    aval = jax.ShapeDtypeStruct((8,), jnp.float32)
    first, again, other = (np.asarray(random_input(aval, seed=seed)) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_large_arrays_are_filled_to_the_end():
    values = random_input(jax.ShapeDtypeStruct((3, 1 << 20), jnp.float32))
    assert values.shape == (3, 1 << 20) and float(jnp.abs(values[2]).sum()) > 0.0


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int4])
def test_integers_are_zero_so_that_they_are_valid_indices(dtype):
    values = random_input(jax.ShapeDtypeStruct((3,), dtype))
    assert values.dtype == dtype and not np.asarray(values, np.int32).any()


def test_booleans_contain_both_values():
    values = np.asarray(random_input(jax.ShapeDtypeStruct((100,), jnp.bool_)))
    assert values.dtype == np.bool_ and 0 < values.sum() < 100


def test_complex_numbers_have_both_parts():
    values = np.asarray(random_input(jax.ShapeDtypeStruct((100,), jnp.complex64)))
    assert values.dtype == np.complex64 and np.real(values).std() > 0.1 < np.imag(values).std()


@pytest.mark.parametrize("name", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_of_the_implementation_asked_for(name):
    dtype = jax.random.key(0, impl=name).dtype
    keys = random_input(jax.ShapeDtypeStruct((2, 3), dtype))
    assert keys.shape == (2, 3) and keys.dtype == dtype
    assert jax.random.uniform(keys[0, 0]).shape == ()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_arrays(shape):
    assert random_input(jax.ShapeDtypeStruct(shape, jnp.float32)).shape == shape


def optimised(fn, *shapes: tuple[int, ...]) -> str:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(fn).lower(*avals).compile().as_text() or ""


def test_the_hash_ignores_names_and_source_locations():
    def first(x, y):
        return jnp.sin(x) @ y

    def second(left, right):
        with jax.named_scope("elsewhere"):
            scaled = jnp.sin(left)
        return scaled @ right

    texts = [optimised(fn, (4, 5), (5, 6)) for fn in (first, second)]
    assert texts[0] != texts[1]
    assert hlo_hash(texts[0]) == hlo_hash(texts[1])


def test_the_hash_depends_on_operations_shapes_and_operand_order():
    different = [
        optimised(lambda x, y: x - y, (4,), (4,)),
        optimised(lambda x, y: y - x, (4,), (4,)),
        optimised(lambda x, y: x * y, (4,), (4,)),
        optimised(lambda x, y: x - y, (5,), (5,)),
    ]
    assert len(set(map(hlo_hash, different))) == 4


def test_the_hash_ignores_metadata_with_braces_in_quotes():
    line = "  ROOT %a.1 = f32[4]{0} negate(%b.2)"
    marked = line + ', metadata={op_name="jit(f)/while{\\"x}" source_line=3}'
    assert hlo_hash(line) == hlo_hash(marked)
