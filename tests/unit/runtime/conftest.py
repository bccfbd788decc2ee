"""MXNet is imported here, once, so that its own deprecations (numpy's old names) are not errors of the tests."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet  # noqa: F401
