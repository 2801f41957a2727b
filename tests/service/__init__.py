"""Tests of the service; where the extra is not installed they skip, and say so.

`make test-serve` sets QUALMS_NEEDS_SERVE: there, a package that is not installed is an error.
"""

import os
from importlib.util import find_spec

import pytest

MISSING = [
    name
    for name in ("fastapi", "litserve", "prometheus_client", "multipart")
    if find_spec(name) is None
]
if MISSING and "QUALMS_NEEDS_SERVE" not in os.environ:
    pytest.skip(f"{MISSING[0]} is not installed; run `make test-serve`", allow_module_level=True)
