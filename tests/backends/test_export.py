"""Saving and loading: what comes back, what is refused, and what a failed save leaves behind."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.backends import loading
from xrl_jax.backends.archive import LoadError, read_archive
from xrl_jax.backends.fast import Fast
from xrl_jax.backends.loading import load
from xrl_jax.backends.plain_data import SaveError, pack_tree, unpack_tree
from xrl_jax.backends.saving import FORMAT
from xrl_jax.frontends.jaxpr import from_jax

W = {"a": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.arange(4.0)}
X = jnp.linspace(0, 2, 6).reshape(2, 3)


def dense(w, x, *, scale=1.0):
    """A layer."""
    return {"out": jnp.tanh(x @ (w["a"] * 2) + w["b"]) * scale, "n": (x > 0).sum()}


def make(fn, *args, weights=(), **options: Any) -> Fast:
    return Fast(from_jax(fn, *args, weights=weights), fn, **options)


def round_trip(fast: Fast, folder: Path) -> Fast:
    fast.save(folder / "f.xrl")
    return load(folder / "f.xrl")


@pytest.fixture(scope="module")
def fast() -> Fast:
    return make(dense, W, X, weights=(0,))


@pytest.fixture(scope="module")
def file(fast: Fast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "dense.xrl"
    fast.save(path)
    return path


@pytest.fixture(scope="module")
def loaded(file: Path) -> Fast:
    return load(file)


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# --- what comes back ---


def test_a_loaded_function_returns_the_same_values_and_structure(fast: Fast, loaded: Fast) -> None:
    same(loaded(W, X), fast(W, X))
    same(jax.jit(loaded)(W, X), jax.jit(fast)(W, X))


def test_signature_name_and_documentation_are_restored(loaded: Fast) -> None:
    assert str(inspect.signature(loaded)) == "(w, x, *, scale=1.0)"
    assert (vars(loaded)["__name__"], loaded.__doc__) == ("dense", "A layer.")
    same(loaded(x=X, w=W), loaded(W, X))


def test_weights_are_prepared_once_and_unchanged_ones_are_not_copied(
    fast: Fast, loaded: Fast
) -> None:
    prepared = loaded.prepare(W)
    assert any(v is W["b"] for v in prepared.values)
    assert loaded.weight_bytes_added == fast.weight_bytes_added == 48
    same(loaded.call(prepared, X), fast(W, X))


def test_gradients_are_those_of_the_original(loaded: Fast) -> None:
    def gradients(f):
        return jax.grad(lambda w, x: f(w, x)["out"].sum(), (0, 1))

    expected = gradients(dense)(W, X)
    for got in (gradients(loaded)(W, X), jax.jit(gradients(loaded))(W, X)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def test_vmap_and_its_gradient_work(loaded: Fast) -> None:
    xs = jnp.stack([X, 2 * X, -X])
    expected = jnp.stack([loaded(W, x)["out"] for x in xs])
    np.testing.assert_allclose(jax.vmap(lambda x: loaded(W, x)["out"])(xs), expected, rtol=1e-6)
    got = jax.grad(lambda xs: jax.vmap(lambda x: loaded(W, x)["out"])(xs).sum())(xs)
    want = jax.grad(lambda xs: dense(W, xs)["out"].sum())(xs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_second_derivatives_are_refused(loaded: Fast) -> None:
    with pytest.raises(TypeError, match="reverse mode"):
        jax.hessian(lambda x: loaded(W, x)["out"].sum())(X)


def test_custom_derivative_rules_are_saved(tmp_path: Path) -> None:
    def straight_through(x):
        return x + jax.lax.stop_gradient(jnp.round(x) - x)

    loaded = round_trip(make(straight_through, X), tmp_path)
    assert jax.grad(lambda x: loaded(x).sum())(X).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_missing_reverse_derivative_is_an_error_only_when_asked_for(tmp_path: Path) -> None:
    def halved(x):
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)

    loaded = round_trip(make(halved, X), tmp_path)
    same(loaded(X), jax.jit(halved)(X))
    with pytest.raises(TypeError, match="halved has no derivative: ValueError: Reverse-mode"):
        jax.grad(lambda x: loaded(x).sum())(X)


def test_closed_over_arrays_are_stored_once(tmp_path: Path) -> None:
    table = jnp.arange(8192.0)
    loaded = round_trip(make(lambda x: (x * table).sum(), jnp.ones(8192)), tmp_path)
    assert float(loaded(jnp.ones(8192))) == 8191 * 4096
    assert jax.grad(loaded)(jnp.ones(8192))[7] == 7
    assert (tmp_path / "f.xrl").stat().st_size < 2 * table.nbytes


def test_keys_small_floats_and_empty_arrays(tmp_path: Path) -> None:
    key, empty = jax.random.key(3), jnp.zeros((0, 3))
    noise = jax.random.split(key, 2)

    def fn(k, h, z):
        return jax.random.key_data(jax.random.split(k)), noise[0], h * 2, z + 1, h.astype("int8")

    args = (key, jnp.arange(3, dtype=jnp.bfloat16), empty)
    loaded = round_trip(make(fn, *args), tmp_path)
    got, want = loaded(*args), fn(*args)
    assert [g.dtype for g in got] == [w.dtype for w in want]
    np.testing.assert_array_equal(got[0], want[0])
    assert jnp.array_equal(jax.random.key_data(got[1]), jax.random.key_data(want[1]))
    assert got[2].tolist() == [0, 2, 4] and got[3].shape == (0, 3)


def test_python_numbers_and_static_arguments(tmp_path: Path) -> None:
    def fn(x, mode, n):
        return x * n if mode == "times" else x

    loaded = round_trip(make(fn, X, "times", 3), tmp_path)
    same(loaded(X, "times", 3), X * 3)
    with pytest.raises(TypeError, match="runs on the arguments it was made for"):
        loaded(X, "other", 3)


def test_options_report_and_program_text_are_restored(tmp_path: Path) -> None:
    class Report:
        def as_dict(self):
            return {"speedup": 2.0}

    options = {"xla_cpu_enable_fast_math": False}
    fast = make(jnp.tanh, X, options=options, report=Report())
    loaded = round_trip(fast, tmp_path)
    assert loaded.options == options
    assert loaded.report == {"speedup": 2.0}
    assert loaded.program_text == str(fast.program)
    assert "call_exported" in str(loaded.program)
    same(loaded(X), fast(X))


def test_other_shapes_are_refused(loaded: Fast) -> None:
    with pytest.raises(TypeError, match=r"argument float32\[2, 3\], got float32\[1, 3\]"):
        loaded(W, X[:1])


def test_a_loaded_function_can_be_saved_again(loaded: Fast, tmp_path: Path) -> None:
    again = round_trip(loaded, tmp_path)
    same(again(W, X), loaded(W, X))
    assert again.program_text == loaded.program_text


def test_on_another_device_it_is_right_and_says_that_it_was_chosen_elsewhere(
    fast: Fast, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "device_text", lambda: "NVIDIA H200 (PJRT C API cuda 13.0)")
    with pytest.warns(UserWarning, match=r"was optimised on cpu, and this is NVIDIA H200 \(.*13.0"):
        loaded = load(file)
    same(loaded(W, X), fast(W, X))


def test_a_fresh_process_needs_nothing_but_the_file(fast: Fast, file: Path) -> None:
    program = f"""
import json
import jax, jax.numpy as jnp
import xrl_jax
fast = xrl_jax.load({str(file)!r})
w = {{"a": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.arange(4.0)}}
x = jnp.linspace(0, 2, 6).reshape(2, 3)
g = jax.grad(lambda x: fast(w, x)["out"].sum())(x)
print(json.dumps([fast(w, x)["out"].tolist(), g.tolist()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    out, gradient = json.loads(done.stdout)
    np.testing.assert_array_equal(np.float32(out), fast(W, X)["out"])
    expected = jax.grad(lambda x: dense(W, x)["out"].sum())(X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


# --- tree structures ---


class Pair(NamedTuple):
    left: Any
    right: Any


def test_tree_structures_of_plain_containers_are_restored() -> None:
    tree = jax.tree.structure({"a": [1, (2, None)], "b": Pair(3, {4: ()})})
    packed = json.loads(json.dumps(pack_tree(tree, "the result")))
    assert unpack_tree(packed) == tree


def test_an_unknown_named_tuple_gets_a_class_of_its_own() -> None:
    tree = jax.tree.structure(Pair(1, 2))
    packed = pack_tree(tree, "the result")
    packed["namedtuple"][0] = "no.such.module"
    made = jax.tree.unflatten(unpack_tree(packed), [5, 6])
    assert (type(made).__name__, made.left, made.right) == ("Pair", 5, 6)


# --- arguments of other classes ---


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["act"])
@dataclass
class Layer:
    """A layer as libraries of networks define it."""

    weight: Any
    act: Any

    def __call__(self, x: Any) -> Any:
        return self.act(self.weight * x)


def test_a_loaded_function_takes_containers_of_any_class(tmp_path: Path) -> None:
    layer = Layer(X, jnp.tanh)
    make(lambda layer, x: layer(x), layer, X).save(tmp_path / "f.xrl")
    loaded = load(tmp_path / "f.xrl")
    np.testing.assert_array_equal(loaded(layer, X), jnp.tanh(X * X))
    np.testing.assert_array_equal(loaded(Layer(2 * X, jnp.tanh), X), jnp.tanh(2 * X * X))


def test_a_loaded_function_checks_non_array_data_of_containers(tmp_path: Path) -> None:
    make(lambda layer, x: layer(x), Layer(X, jnp.tanh), X).save(tmp_path / "f.xrl")
    with pytest.raises(TypeError, match="runs on the arguments it was made for"):
        load(tmp_path / "f.xrl")(Layer(X, jnp.sin), X)


# --- what cannot be saved ---


def test_custom_containers_are_refused_by_name(tmp_path: Path) -> None:
    fast = make(lambda x: OrderedDict(y=x), X)
    with pytest.raises(SaveError, match=r"the result: a collections\.OrderedDict cannot be saved"):
        fast.save(tmp_path / "f.xrl")
    assert list(tmp_path.iterdir()) == []


def test_functions_as_arguments_are_refused(tmp_path: Path) -> None:
    fast = make(lambda f, x: f(x), jnp.tanh, X)
    with pytest.raises(SaveError, match="the arguments: .* is neither an array nor a string"):
        fast.save(tmp_path / "f.xrl")


def test_callbacks_are_refused(tmp_path: Path) -> None:
    def fn(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(SaveError, match="Callbacks, debug prints"):
        make(fn, X).save(tmp_path / "f.xrl")


def test_a_missing_folder_is_named(fast: Fast, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder: .*nowhere"):
        fast.save(tmp_path / "nowhere" / "f.xrl")


def test_a_full_disk_leaves_the_old_file(
    fast: Fast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.xrl").write_text("old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="cannot save: the disk is full"):
        fast.save(tmp_path / "f.xrl")
    assert [p.name for p in tmp_path.iterdir()] == ["f.xrl"]
    assert (tmp_path / "f.xrl").read_text() == "old"


# --- what cannot be loaded ---


def repacked(file: Path, to: Path, change=lambda head: None, **parts: bytes | None) -> Path:
    """Copy the file with a changed header, and with parts replaced, added or (None) left out."""
    with zipfile.ZipFile(file) as archive:
        content: dict[str, Any] = {n: archive.read(n) for n in archive.namelist()}
    content |= {name.replace("__", "."): data for name, data in parts.items()}
    head = json.loads(content["header.json"])
    change(head)
    content["header.json"] = json.dumps(head).encode()
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in content.items():
            if data is not None:
                archive.writestr(name, data)
    return to


def refused(path: Path, match: str) -> None:
    with pytest.raises(LoadError, match=match):
        load(path)


def test_a_file_that_is_no_zip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("hello")
    refused(tmp_path / "f", "is damaged or not a saved function")


def test_another_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f", "w") as archive:
        archive.writestr("a.txt", "hello")
    refused(tmp_path / "f", "is not a saved function: it has no header.json")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused(file: Path, tmp_path: Path, share: float) -> None:
    data = file.read_bytes()
    (tmp_path / "f").write_bytes(data[: int(share * len(data))])
    refused(tmp_path / "f", "is damaged or not a saved function")


def test_every_flipped_bit_is_harmless_or_refused(file: Path, tmp_path: Path) -> None:
    data, good = file.read_bytes(), read_archive(file, FORMAT)
    rng = np.random.default_rng(0)
    tail = range(len(data) - 700, len(data))  # the zip's own directory
    refusals = 0
    for place in [*range(0, 60), *tail, *rng.integers(0, len(data), 300).tolist()]:
        broken = bytearray(data)
        broken[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "f").write_bytes(broken)
        try:
            assert read_archive(tmp_path / "f", FORMAT) == good  # dates and the like may differ
        except LoadError:
            refusals += 1
    assert refusals > 500


def test_a_wrong_checksum_is_refused(file: Path, tmp_path: Path) -> None:
    size = len(zipfile.ZipFile(file).read("program.txt"))
    path = repacked(file, tmp_path / "f", program__txt=b"#" * size)
    refused(path, "program.txt does not have the stated checksum")


def test_a_missing_part_is_refused(file: Path, tmp_path: Path) -> None:
    path = repacked(file, tmp_path / "f", call__stablehlo=None)
    refused(path, r"its parts differ from those in its header.json: \['call.stablehlo'\]")


def test_parts_that_are_not_listed_are_refused(file: Path, tmp_path: Path) -> None:
    path = repacked(file, tmp_path / "f", **{"../../evil": b"x"})
    refused(path, r"differ from those in its header.json: \['../../evil'\]")


@pytest.mark.parametrize("number", [4, 6])
def test_another_format_is_refused(number: int, file: Path, tmp_path: Path) -> None:
    def other(head):
        head.update(format=number, written_by="xrl_jax 9.9")

    path = repacked(file, tmp_path / "f", other)
    refused(path, rf"has format {number}, .* reads 5: .* written by xrl_jax 9\.9; use that version")


def test_compressed_parts_are_refused(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "f", "w") as new:
        for name in old.namelist():
            kind = zipfile.ZIP_STORED if name == "header.json" else zipfile.ZIP_DEFLATED
            new.writestr(name, old.read(name), kind)
    refused(tmp_path / "f", "is compressed")


def test_another_platform_is_refused(file: Path, tmp_path: Path) -> None:
    path = repacked(file, tmp_path / "f", lambda head: head.update(platform="tpu"))
    refused(path, "was saved for the platform 'tpu'")


def test_a_header_that_lacks_an_entry_is_refused(file: Path, tmp_path: Path) -> None:
    path = repacked(file, tmp_path / "f", lambda head: head.pop("result"))
    refused(path, "cannot be read by jax .*; it was written by xrl_jax .*: KeyError: 'result'")


def test_an_invalid_artefact_is_refused(file: Path, tmp_path: Path) -> None:
    junk = b"\x01" * 100

    def state(head):
        head["parts"]["call.stablehlo"] = [len(junk), hashlib.sha256(junk).hexdigest()]

    refused(repacked(file, tmp_path / "f", state, call__stablehlo=junk), "cannot be read by jax")


def test_64_bit_types_need_the_x64_setting(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        wide = jnp.arange(3, dtype=jnp.float64)
        make(lambda x: x * 2, wide).save(tmp_path / "f")
        assert load(tmp_path / "f")(wide).dtype == jnp.float64
    refused(tmp_path / "f", "takes or returns float64: .*jax_enable_x64")
