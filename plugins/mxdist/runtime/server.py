"""A scheduler or a parameter server of MXNet: ``python -m mxdist.runtime.server``, with its ``DMLC_ROLE`` set.

Nothing of mxdist is needed here but the tie to the supervisor. MXNet runs the loop of the role while it is imported,
and ends the process once every worker has left.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from mxdist.runtime.parent import die_with_parent

_ROLES = ("scheduler", "server")


def main() -> NoReturn:
    """Serve until all workers have left."""
    die_with_parent()
    role = os.environ.get("DMLC_ROLE")
    if role not in _ROLES:
        sys.exit(f"DMLC_ROLE is {role!r}; it must be {' or '.join(_ROLES)}")
    import mxnet  # noqa: F401  # serves

    sys.exit(f"MXNet did not run as {role}: it was built without distributed key-value stores")


if __name__ == "__main__":
    main()
