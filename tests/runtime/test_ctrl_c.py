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
from xrl_jax.runtime.ctrl_c import lost_ctrl_c_kept, plain_ctrl_c, raise_lost_ctrl_c


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
def test_a_ctrl_c_that_python_ignores_is_raised_at_the_next_look_at_the_clock(press) -> None:
    clock = Stopwatch(600.0)
    with lost_ctrl_c_kept():
        press()
        with pytest.raises(KeyboardInterrupt):
            bool(clock.done)
        assert not clock.done  # it is raised once


def test_without_a_look_it_is_raised_at_the_end() -> None:
    with lost_ctrl_c_kept(), pytest.raises(KeyboardInterrupt), plain_ctrl_c():
        in_a_finaliser()


def test_one_that_is_pressed_again_counts_once() -> None:
    with lost_ctrl_c_kept():
        with pytest.raises(KeyboardInterrupt), plain_ctrl_c():
            in_a_finaliser()
            signal.raise_signal(signal.SIGINT)
        raise_lost_ctrl_c()


def test_one_that_came_too_late_is_not_for_the_next_search() -> None:
    with lost_ctrl_c_kept():
        in_a_finaliser()
    with lost_ctrl_c_kept():
        raise_lost_ctrl_c()


def test_the_handler_is_put_back_and_one_of_the_users_own_is_left_alone() -> None:
    with lost_ctrl_c_kept():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def own(*_) -> None: ...

    signal.signal(signal.SIGINT, own)
    with lost_ctrl_c_kept():
        assert signal.getsignal(signal.SIGINT) is own


def test_what_python_ignores_is_still_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_type))
    with lost_ctrl_c_kept():
        in_a_finaliser()
    assert told == [KeyboardInterrupt]


def test_another_thread_changes_nothing_and_takes_no_ctrl_c_of_the_main_thread() -> None:
    ended = []

    def work() -> None:
        with lost_ctrl_c_kept(), plain_ctrl_c():
            raise_lost_ctrl_c()
            ended.append(True)

    with lost_ctrl_c_kept():
        in_a_finaliser()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ended == [True]
        with pytest.raises(KeyboardInterrupt):
            raise_lost_ctrl_c()
