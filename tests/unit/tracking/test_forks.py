"""A worker forked while another thread asks MLflow, as Airflow's LocalExecutor forks them from the scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BEGINNING = """
    import json, os, signal, socket, sys, threading, warnings
    warnings.simplefilter("ignore")  # newer Pythons warn of forks among threads
    from mxdist.errors import TrackingError
    from mxdist.tracking.client import Client, Login, load_mlflow

    def told_by_child(work):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # what hangs is ended
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        print(os.read(reading, 10_000).decode() or "nothing", flush=True)
        os._exit(0)
"""
ASKING = """
    server = socket.create_server(("127.0.0.1", 0))
    uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    login = Login("ann", "canary-secret")
    threading.Thread(target=Client(uri, login).call, args=("get_run", "1" * 32), daemon=True).start()
    connection, _ = server.accept()
    assert connection.recv(100)  # and it is never answered

    def work():
        names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_HTTP_REQUEST_TIMEOUT")
        before = {name: os.environ.get(name) for name in names}
        try:
            Client("http://127.0.0.1:9").call("get_run", "1" * 32)
        except TrackingError as error:
            shown = os.popen("env").read()
            return [before, "did not answer" in str(error), "canary-secret" in shown]

    told_by_child(work)
"""
IMPORTING = """
    threading.Thread(target=load_mlflow, daemon=True).start()
    while not os.path.exists("begun"):
        pass
    threading.Timer(1.0, lambda: open("go", "w").close()).start()
    told_by_child(lambda: load_mlflow().__name__)
"""
SLOW = """
    import os
    open("begun", "w").close()
    while not os.path.exists("go"):
        pass
"""


def run(tmp_path: Path, program: str, *, path: str = "", **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    known["PYTHONPATH"] = os.pathsep.join(filter(None, [path, *sys.path]))
    code = textwrap.dedent(BEGINNING) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=known | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("own", [None, "the site's"], ids=["no password before", "another before"])
def test_child_forked_during_a_call_can_call_and_has_no_password(tmp_path: Path, own: str | None) -> None:
    environment = {"MLFLOW_TRACKING_USERNAME": own, "MLFLOW_TRACKING_PASSWORD": own} if own else {}
    before = '"MLFLOW_TRACKING_PASSWORD": "the site\'s"' if own else '"MLFLOW_TRACKING_PASSWORD": null'
    told = run(tmp_path, ASKING, **environment)
    assert before in told
    assert '"MLFLOW_HTTP_REQUEST_TIMEOUT": null' in told
    assert told.endswith("true, false]")


def test_child_forked_during_the_import_of_mlflow_can_import_it(tmp_path: Path) -> None:
    package = tmp_path / "path" / "mlflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(SLOW))
    assert run(tmp_path, IMPORTING, path=str(package.parent)) == '"mlflow"'
