"""Ctrl-C during a search: a KeyboardInterrupt for whatever phase it falls into, never lost on the
way.

Python drops what is raised in finalisers and in the garbage collector's callbacks, of which JAX has
one, and C++ code may clear what it does not expect. So each press is noted until some part of the
search has dealt with it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_noted = False  # a press that nobody has dealt with; the main thread's, like all signals


@contextlib.contextmanager
def lost_ctrl_c_kept() -> Iterator[None]:
    """Inside, in the main thread, a press of Ctrl-C is kept for `raise_lost_ctrl_c` until
    `plain_ctrl_c` has seen its KeyboardInterrupt. A handler of the user's own is left alone.
    """
    global _noted
    default = signal.default_int_handler
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        global _noted
        _noted = True
        default(number, frame)

    _noted = False
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
        _noted = False


def raise_lost_ctrl_c() -> None:
    """KeyboardInterrupt where a Ctrl-C was lost in this thread since the last one that was not."""
    if _take():
        raise KeyboardInterrupt


@contextlib.contextmanager
def plain_ctrl_c() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, at the end at the latest, even where Python ignores
    it or JAX makes another error of it, as it does when it is comparing the static fields of
    pytrees.
    """
    try:
        yield
        raise_lost_ctrl_c()
    except KeyboardInterrupt:
        _take()  # who presses again because nothing happens means the same
        raise
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            _take()
            raise error.__cause__ from None
        raise


def _take() -> bool:
    """Whether a press is noted in this thread; it is not from now on."""
    global _noted
    if not (_noted and _in_main_thread()):
        return False
    _noted = False
    return True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
