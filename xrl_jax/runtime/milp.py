"""Mixed-integer programs, solved by HiGHS (Huangfu, Hall 2018) in a process of its own, because it
may run long past its time limit.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

import numpy as np

from xrl_jax.runtime import milp_process

_GRACE = 1.0  # seconds past the limit that the solver may take to answer
_START = 60.0  # seconds until the process has loaded SciPy


@dataclass(frozen=True)
class Milp:
    """Minimise cost · x subject to low <= matrix x, least <= x <= most; some x are integers.

    The matrix is given by rows, columns and values of its entries. Letters: N variables, M rows.
    """

    cost: np.ndarray  # [N]
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    low: np.ndarray  # [M]
    least: np.ndarray  # [N]
    most: np.ndarray  # [N]
    integral: np.ndarray  # [N] 1 for an integer, else 0


class Solved(NamedTuple):
    """A solution.

    Attributes:
      x: [N]; None if none was found in time.
      bound: no solution costs less; -inf where nothing is known.
      optimal: whether it was proven that none is better.
      infeasible: whether it was proven that there is none.
    """

    x: np.ndarray | None
    bound: float
    optimal: bool
    infeasible: bool


_NOTHING = Solved(None, -np.inf, optimal=False, infeasible=False)


class MilpSolver:
    """Solves programs in a process that is started when first needed, and again after it was
    killed. Use it as a context manager, or call `close`.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process = None

    def solve(self, program: Milp, seconds: float) -> Solved:
        """Return the best solution found in so many seconds; the process is killed if it takes
        longer. Ctrl-C kills it, too.
        """
        if seconds <= 0:
            return _NOTHING
        grace = _GRACE
        if self._process is None:
            command = [sys.executable, milp_process.__file__]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            grace += _START
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds + grace, process.kill)
        timer.start()
        try:
            milp_process.write(process.stdin, (asdict(program), seconds))
            found = milp_process.read(process.stdout)
        except (EOFError, OSError):  # killed
            self.close()
            return _NOTHING
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        bound = -np.inf if found["bound"] is None else float(found["bound"])
        return Solved(found["x"], bound, found["optimal"], found["status"] == 2)
