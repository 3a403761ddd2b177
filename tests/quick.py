"""Compile options for tests that compile large functions and run them once."""

from __future__ import annotations

from typing import Any

QUICK: dict[str, Any] = {"xla_backend_optimization_level": "0"}  # the cheapest to compile
