"""`make stop` and `make clean`: end everything that `make demo` started; with --clean, remove its state as well."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from locking import locked
from stack.local import running, stop
from stack.processes import ServiceError

HOME = Path(__file__).resolve().parents[1] / ".mxdist"


def main() -> int:
    """Stop, and clean if asked to."""
    state = HOME / "state"
    if not HOME.exists():
        print("Nothing has been started here.")
        return 0
    try:
        with locked(HOME):
            count = len(running(state))
            print(f"Stopping {count} processes ..." if count else "Nothing is running.", flush=True)
            stop(state)
            if "--clean" in sys.argv:
                if state.exists():
                    shutil.rmtree(state)
                    print("Removed the state. The environments stay; `rm -r .mxdist` removes them too.")
                else:
                    print("There is no state.")
    except ServiceError as error:
        print(error, file=sys.stderr)
        return 1
    print("Stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
