"""Make the environments in .mxdist/, or pin their requirements: environments.py [--dev | --mpi | --lock]"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from envs.environments import Layout, ensure, ensure_mpi, lock
from locking import locked
from stack.local import stop
from steps import StepFailed, Steps

REPOSITORY = Path(__file__).parents[1]


def main() -> int:
    """Run it from the command line."""
    try:
        if "--lock" in sys.argv:
            lock(REPOSITORY)
        elif "--mpi" in sys.argv:
            home = Layout(REPOSITORY).home
            with locked(home):
                ensure_mpi(REPOSITORY, steps=Steps())
        else:
            home = Layout(REPOSITORY).home
            with locked(home):
                ensure(REPOSITORY, dev="--dev" in sys.argv, steps=Steps(), before_rebuild=lambda: stop(home / "state"))
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the next run goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
