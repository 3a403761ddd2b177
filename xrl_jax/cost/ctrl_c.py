"""Ctrl-C during a search: a KeyboardInterrupt for whatever phase it falls into, never lost on the
way.

Signal handlers are left as they are: a second Ctrl-C, and a handler of the user's own, do what they
always do.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_ignored = False  # by Python, and not raised again yet; the main thread's, like all signals


@contextlib.contextmanager
def lost_ctrl_c_kept() -> Iterator[None]:
    """Inside, in the main thread, a Ctrl-C is kept for `raise_lost_ctrl_c` where Python has to
    ignore what is raised: in finalisers and in the garbage collector's callbacks, of which JAX has
    one.
    """
    if not _in_main_thread():
        yield
        return
    before = sys.unraisablehook

    def hook(ignored: Any) -> None:
        global _ignored
        if issubclass(ignored.exc_type, KeyboardInterrupt) and _in_main_thread():
            _ignored = True
        else:
            before(ignored)

    _take()  # what came too late for the search before
    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


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
            raise error.__cause__ from None
        raise


def _take() -> bool:
    """Whether a Ctrl-C was lost in this thread; it is not from now on."""
    global _ignored
    if not (_ignored and _in_main_thread()):
        return False
    _ignored = False
    return True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
