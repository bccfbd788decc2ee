"""A scheduler or a parameter server of MXNet: ``python -m mxdist.runtime.server``, with its ``DMLC_ROLE`` set.

Nothing of mxdist is needed here but the tie to the supervisor. MXNet would run the loop of the role while it is still
being imported, where an optimizer that was sent here finds half a module; so it is imported whole, and then told its
role. MXNet would also go on after an error in an optimizer, with weights that are not updated; here the server ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NoReturn

from mxdist.runtime import exit_codes
from mxdist.runtime.parent import die_with_parent

_ROLES = ("scheduler", "server")


def main() -> NoReturn:
    """Serve until all workers have left."""
    die_with_parent()
    role = os.environ.pop("DMLC_ROLE", None)
    if role not in _ROLES:
        sys.exit(f"DMLC_ROLE is {role!r}; it must be {' or '.join(_ROLES)}")
    from mxnet.kvstore import kvstore_server

    os.environ["DMLC_ROLE"] = role
    sys.unraisablehook = _end
    kvstore_server._init_kvstore_server_module()
    sys.exit(f"MXNet did not run as {role}")


def _end(error: Any) -> None:
    """End the process if what nobody catches was raised by what a worker sent; the last line says what it was."""
    traceback.print_exception(error.exc_value)
    if "ctypes callback" in (error.err_msg or ""):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_codes.USER_ERROR)


if __name__ == "__main__":
    main()
