"""MXNet is imported here, once, so that its own deprecations (old names of numpy) are not errors of the tests."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    """Let MXNet look for ``scipy.sparse.csr`` whenever it makes an array."""
    config.addinivalue_line("filterwarnings", "ignore:Please import `csr_matrix` from:DeprecationWarning")
