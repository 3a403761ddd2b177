"""Ctrl-C during a search raises KeyboardInterrupt in whatever phase it occurs, and is never lost.

Python drops exceptions raised in finalisers and in callbacks of the garbage collector, of which JAX
has one, and C++ code may clear exceptions that it does not expect. Each press is therefore noted
until some part of the search has handled it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_noted = False  # whether a press is not handled yet; of the main thread, like all signals


@contextlib.contextmanager
def keep_ctrl_c() -> Iterator[None]:
    """Keep each press of Ctrl-C inside this context until its KeyboardInterrupt is handled.

    A press is kept for `raise_lost_ctrl_c` until `plain_ctrl_c` has seen its KeyboardInterrupt.
    Only the main thread is affected, and a handler that the user has installed is left in place.
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
    """Raise KeyboardInterrupt if a press of Ctrl-C in this thread is not handled yet."""
    if _take():
        raise KeyboardInterrupt


@contextlib.contextmanager
def plain_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C inside this context, at its end at the latest.

    This holds even if Python ignores the exception, or if JAX turns it into another error, as it
    does while comparing the static fields of pytrees.
    """
    try:
        yield
        raise_lost_ctrl_c()
    except KeyboardInterrupt:
        _take()  # a repeated press, because nothing happened, counts as the same one
        raise
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            _take()
            raise error.__cause__ from None
        raise


def _take() -> bool:
    """Return whether a press is noted in this thread, and clear the note."""
    global _noted
    if not (_noted and _in_main_thread()):
        return False
    _noted = False
    return True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
