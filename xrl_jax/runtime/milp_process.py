"""The process that `milp` starts: reads mixed-integer programs from standard input and answers on
standard output, each a length and a pickle.

It is run as a file, so that it loads neither JAX nor the package.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from typing import IO, Any

HEADER = struct.Struct("<Q")


def read(stream: IO[bytes]) -> Any:
    """Return the next message; EOFError at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return pickle.loads(body)


def write(stream: IO[bytes], message: Any) -> None:
    body = pickle.dumps(message)
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def _solve(given: dict[str, Any], seconds: float) -> dict[str, Any]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    rows, columns, values = given["rows"], given["columns"], given["values"]
    shape = len(given["low"]), len(given["cost"])
    matrix = csr_array((values, (rows, columns)), shape=shape)
    found = milp(
        given["cost"],
        integrality=given["integral"],
        bounds=Bounds(given["least"], given["most"]),
        constraints=LinearConstraint(matrix, lb=given["low"]),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    bound = getattr(found, "mip_dual_bound", None)
    return {"x": found.x, "bound": bound, "optimal": found.status == 0, "status": found.status}


def main() -> None:
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever the solver prints, in C++ too, is no answer
        while True:
            try:
                given, seconds = read(sys.stdin.buffer)
            except EOFError:
                return
            write(answers, _solve(given, seconds))


if __name__ == "__main__":
    main()
