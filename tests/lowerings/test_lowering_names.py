"""The op table names the forms that the backend has, in the same order: indices are saved in
programs.
"""

from __future__ import annotations

import pytest

from xrl_jax.graph import ops
from xrl_jax.lowerings.table import LOWERINGS


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_the_op_table_names_the_forms_of_the_backend(op: str) -> None:
    assert ops.OPS[op].lowerings == tuple(form.name for form in LOWERINGS[op])
