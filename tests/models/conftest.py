"""Fixtures of the model tests."""

from __future__ import annotations

import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps


@pytest.fixture(params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "reference" else NativeOps(2)
