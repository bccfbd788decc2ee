"""Build Horovod as `make` does, for an image: horovod_wheel.py --requirements requirements-node.txt --into FOLDER"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from envs import horovod, host
from envs.environments import Layout
from steps import StepFailed, Steps

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requirements", type=Path, required=True, help="pinned, with mxnet or mxnet-cu112")
    parser.add_argument("--into", type=Path, required=True, help="folder that gets the wheel")
    wanted = parser.parse_args()
    try:
        wheel = _wheel(wanted.requirements.resolve())
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    wanted.into.mkdir(parents=True, exist_ok=True)
    shutil.copy(wheel, wanted.into)
    return 0


def _wheel(requirements: Path) -> Path:
    layout = Layout(REPOSITORY)
    uv = layout.find_uv()
    if uv is None:
        raise StepFailed("uv is not there; `make environments` brings it")
    cached = horovod.cached_wheel(requirements)
    if cached is not None:
        return cached
    with Steps().step("Build Horovod", lambda: horovod.build_progress(layout.log)):
        return horovod.build_wheel(uv, host.find_python() or "3.11", requirements, layout.log)


if __name__ == "__main__":
    sys.exit(main())
