"""Ctrl-C is not lost where exceptions are dropped, and nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.runtime.ctrl_c import keep_ctrl_c, plain_ctrl_c, raise_lost_ctrl_c


@pytest.fixture(autouse=True)
def interruptible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: None)
    # Tests that a shell runs in the background ignore Ctrl-C by default.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Finalised:
    """An object during whose finalisation Ctrl-C is pressed."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def in_a_finaliser() -> None:
    Finalised()


def in_the_garbage_collector() -> None:
    def callback(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    gc.collect()


def cleared_on_the_way() -> None:
    with contextlib.suppress(BaseException):  # as C++ code clears unexpected exceptions
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("press", [in_a_finaliser, in_the_garbage_collector, cleared_on_the_way])
def test_a_ctrl_c_that_python_ignores_is_raised_at_the_next_clock_check(press) -> None:
    clock = Stopwatch(600.0)
    with keep_ctrl_c():
        press()
        with pytest.raises(KeyboardInterrupt):
            bool(clock.done)
        assert not clock.done  # it is raised once


def test_without_a_clock_check_an_ignored_ctrl_c_is_raised_at_the_end() -> None:
    with keep_ctrl_c(), pytest.raises(KeyboardInterrupt), plain_ctrl_c():
        in_a_finaliser()


def test_ctrl_c_pressed_twice_is_raised_once() -> None:
    with keep_ctrl_c():
        with pytest.raises(KeyboardInterrupt), plain_ctrl_c():
            in_a_finaliser()
            signal.raise_signal(signal.SIGINT)
        raise_lost_ctrl_c()


def test_a_late_ctrl_c_does_not_interrupt_the_next_search() -> None:
    with keep_ctrl_c():
        in_a_finaliser()
    with keep_ctrl_c():
        raise_lost_ctrl_c()


def test_the_handler_is_restored_and_a_custom_handler_is_kept() -> None:
    with keep_ctrl_c():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def own(*_) -> None: ...

    signal.signal(signal.SIGINT, own)
    with keep_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is own


def test_ignored_exceptions_still_reach_the_users_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_type))
    with keep_ctrl_c():
        in_a_finaliser()
    assert told == [KeyboardInterrupt]


def test_another_thread_does_not_take_the_ctrl_c_of_the_main_thread() -> None:
    ended = []

    def work() -> None:
        with keep_ctrl_c(), plain_ctrl_c():
            raise_lost_ctrl_c()
            ended.append(True)

    with keep_ctrl_c():
        in_a_finaliser()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ended == [True]
        with pytest.raises(KeyboardInterrupt):
            raise_lost_ctrl_c()
