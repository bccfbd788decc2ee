"""`make demo`: from a bare machine to a retrained, reviewed and promoted model.

It makes the environments, starts S3, MLflow and Airflow, starts the DAG `mnist_retrain` and follows it to its end.
``MXDIST_DEMO_CONF`` may hold parameters of the DAG as JSON, such as ``{"seed": 1}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from envs.environments import Layout, ensure
from follow.conf import DAG, WrongConf, demo_conf
from locking import locked
from stack.local import stop
from steps import StepFailed, Steps

REPOSITORY = Path(__file__).resolve().parents[1]
_HANDED_ON = "MXDIST_DEMO_STEPS"


def main() -> int:
    """Make the environments with whatever Python runs this; then go on in the control environment."""
    try:
        conf = demo_conf(REPOSITORY / "dags" / f"{DAG}.py")
    except WrongConf as error:
        print(error, file=sys.stderr)
        return 2
    layout = Layout(REPOSITORY)
    control = layout.control / "bin/python"
    if _HANDED_ON in os.environ:
        from follow.drive import demo

        steps = Steps()
        steps.durations = [(title, took) for title, took in json.loads(os.environ.pop(_HANDED_ON))]
        return demo(REPOSITORY, layout.home, steps, conf)
    steps, begin = Steps(), time.monotonic()
    print("mxdist demo: environments", flush=True)
    try:
        with locked(layout.home):
            state = layout.home / "state"
            ensure(REPOSITORY, dev=False, steps=steps, before_rebuild=lambda: stop(state))
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the next `make demo` goes on from here.", file=sys.stderr)
        return 130
    if not steps.durations:
        print(f"  up to date ({time.monotonic() - begin:.1f} s)", flush=True)
    environment = {**os.environ, _HANDED_ON: json.dumps(steps.durations)}
    os.execve(control, [str(control), str(Path(__file__).resolve())], environment)


if __name__ == "__main__":
    sys.exit(main())
