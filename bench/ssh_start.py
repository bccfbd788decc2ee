"""Row ``ssh_start``: from the launch to the first allreduce on three hosts over ssh, over bare horovodrun; needs root.

``python bench/ssh_start.py [--pairs N]``, or ``make bench ROW=ssh_start``. The hosts are nodes of the tests: namespaces
of this machine with a network, a disk and an sshd of their own. Both sides run the same script of three lines; all
clocks are the machine's own. mxdist submits from outside, with its code delivered anew, and records what it always
does; horovodrun is started on the first node, and has the script there already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("plugins", "scripts", "tests")]

from mxdist.launch import JobClient  # noqa: E402
from mxdist.launch.client import log_lines  # noqa: E402
from mxdist.launch.ssh import SshLauncher  # noqa: E402
from mxdist.spec import TrainingJob, parse_job  # noqa: E402
from mxdist.ssh import SshAccess  # noqa: E402
from mxdist.store import Attempt, Credentials, Store, open_store  # noqa: E402
from stack.seaweed import Seaweed  # noqa: E402
from support.guarding import guarded  # noqa: E402
from support.node import PYTHON  # noqa: E402
from support.nodes import Nodes, running_nodes  # noqa: E402
from support.places import control_bin  # noqa: E402

GOAL = 0.8
HOSTS = 3
MARK = "first allreduce at "
SCRIPT = f"""
import time, mxnet as mx, horovod.mxnet as hvd
hvd.init()
hvd.allreduce(mx.nd.ones(1), name="first").wait_to_read()
print({MARK!r} + repr(time.time()), flush=True)
"""
_BOUND_S = 180.0


def main() -> int:
    """Measure, print each pair and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    with running_nodes(HOSTS) as nodes, tempfile.TemporaryDirectory(prefix="mxdist-bench-") as scratch:
        with site(nodes, Path(scratch)) as ours:
            ratios = list(pairs(nodes, ours, options.pairs))
    ratio = statistics.median(ratios)
    print(f"  median {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} pairs")
    print(json.dumps({"row": "ssh_start", "ratio": round(ratio, 3), "goal": GOAL, "ok": ratio <= GOAL}))
    return 0 if ratio <= GOAL else 1


def pairs(nodes: Nodes, ours: Site, count: int) -> Iterator[float]:
    """Yield the ratio of times of each pair; a first one warms the disks' caches and does not count."""
    print(f"ssh_start: launch to the first allreduce on {HOSTS} hosts, mxdist over bare horovodrun", flush=True)
    for pair in range(count + 1):
        peer_s, ours_s = under_horovodrun(nodes), ours.start()
        counts = "warm-up, not counted" if pair == 0 else f"pair {pair}"
        print(f"  {counts}: horovodrun {peer_s:.2f} s, mxdist {ours_s:.2f} s, ratio {ours_s / peer_s:.3f}", flush=True)
        if pair:
            yield ours_s / peer_s


def under_horovodrun(nodes: Nodes) -> float:
    """Return the seconds that horovodrun needs, started on the first node."""
    first = nodes[0]
    for node in nodes:
        (node.root / "var/first.py").write_text(SCRIPT)
    (first.root / "var/key").write_text(nodes.key.read_text())
    (first.root / "var/key").chmod(0o600)
    hosts = ",".join(f"{node.address}:1" for node in nodes)
    program = "from horovod.runner.launch import run_commandline; run_commandline()"
    options = [
        "-np",
        str(HOSTS),
        "-H",
        hosts,
        "--gloo",
        "--ssh-identity-file",
        "/var/key",
        "--network-interface",
        "eth0",
    ]
    began = time.time()
    done = first.exec([PYTHON, "-c", program, *options, PYTHON, "/var/first.py"], timeout_s=_BOUND_S)
    return first_mark(done.stdout.splitlines()) - began


@dataclass
class Site:
    """Where mxdist's jobs run and are recorded.

    :param scratch: a folder for the script.
    """

    nodes: Nodes
    runs: Store
    seaweed: Seaweed
    scratch: Path
    made: int = 0

    def start(self) -> float:
        """Return the seconds that a submission needs; its code is new, so that every host has to get it."""
        self.made += 1
        path = self.scratch / "first.py"
        path.write_text(f"{SCRIPT}# {self.made}\n")
        access = SshAccess("root", key=self.nodes.key.read_text(), known_hosts=tuple(self.nodes.known_hosts))
        client = JobClient(self.runs, SshLauncher(access, python=PYTHON, workdir="/var/mxdist"))
        secrets = {"AWS_ACCESS_KEY_ID": self.seaweed.access_key, "AWS_SECRET_ACCESS_KEY": self.seaweed.secret_key}
        began = time.time()
        attempt = client.submit(self._job(path), f"start-{self.made}", secrets=secrets).attempt
        result = wait_for_result(attempt)
        lines = [text for _, chunk in log_lines(attempt) for _, text in chunk]
        if result != "SUCCEEDED":
            raise SystemExit(f"the job ended as {result}: {lines[-5:]}")
        client.cancel(attempt, by="user", reason="over", wait_s=30)  # nothing runs beside the next side
        return first_mark(lines) - began

    def _job(self, path: Path) -> TrainingJob:
        hosts = [f"{node.address}:1" for node in self.nodes]
        job = parse_job({
            "name": "start", "script": {"path": str(path)}, "parallelism": {"world_size": HOSTS},
            "cluster": {"kind": "ssh", "hosts": hosts}, "storage": {"endpoint_url": self.seaweed.endpoint_url},
        })  # fmt: skip
        assert isinstance(job, TrainingJob)
        return job


@contextmanager
def site(nodes: Nodes, scratch: Path) -> Iterator[Site]:
    """Yield a place for jobs, with an S3 server that the nodes reach."""
    keys = {"access_key": "mxdist-bench", "secret_key": "mxdist-bench-secret"}
    (scratch / "seaweed").mkdir()
    with guarded(scratch / "seaweed") as folder:  # which ends the server also when this process is killed
        server = Seaweed(folder, weed=str(control_bin() / "weed"), host=nodes.gateway, **keys)
        server.start()
        try:
            credentials = Credentials(server.access_key, server.secret_key)
            uri = f"s3://{server.make_bucket()}/runs"
            runs = open_store(uri, endpoint_url=server.endpoint_url, credentials=credentials)
            yield Site(nodes, runs, server, scratch)
        finally:
            server.stop()


def wait_for_result(attempt: Attempt) -> str:
    """Return how the attempt ended."""
    give_up = time.monotonic() + _BOUND_S
    while time.monotonic() < give_up:
        result = attempt.result()
        if result is not None:
            return result.state.name
        time.sleep(0.2)
    raise SystemExit(f"no result within {_BOUND_S:g} s")


def first_mark(lines: list[str]) -> float:
    """Return when the last rank had its first allreduce: Unix time in seconds."""
    times = [float(line.rpartition(MARK)[2]) for line in lines if MARK in line]
    if len(times) != HOSTS:
        raise SystemExit(f"{len(times)} of {HOSTS} ranks came to their first allreduce: {lines[-20:]}")
    return max(times)


if __name__ == "__main__":
    sys.exit(main())
