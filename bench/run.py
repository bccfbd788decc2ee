"""Figures against a peer, side by side in one run: ``python bench/run.py ROW`` (or ``make bench ROW=name``).

Each side is a process of its own; the sides take turns, so that a machine that slows down slows both. The ratio is the
median over pairs. The last line is JSON: ``{"row": ..., "ratio": ..., "goal": ..., "ok": ...}``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONTROL = Path(os.environ.get("MXDIST_CONTROL_BIN", ROOT / ".mxdist/control/bin"))
NODE_PYTHON = Path(os.environ.get("MXDIST_NODE_PYTHON", ROOT / ".mxdist/node/bin/python"))

Side = Callable[[int], float]
"""Runs one side once (the number of the pair is given), and returns steps per second."""


@dataclass(frozen=True)
class Row:
    """One figure.

    :param ours: steps per second under mxdist.
    :param peer: steps per second of what it is held against.
    :param goal: the smallest ratio that is good enough.
    """

    about: str
    ours: Side
    peer: Side
    goal: float


def run(command: Sequence[str], environment: dict[str, str] | None = None, cores: set[int] | None = None) -> str:
    """Run a command to its end, pinned to ``cores`` if given; return what it printed.

    :raises SystemExit: it failed; its output is shown.
    """
    inherited = {**os.environ, "PYTHONPATH": f"{ROOT / 'plugins'}:{HERE}", **(environment or {})}
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, preexec_fn=pin)  # noqa: PLW1509
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def speed(report: str) -> float:
    """Return the steps per second of a side's one-line report."""
    told = json.loads(report)
    return float(told["steps"]) / float(told["seconds"])


def loop_side(script: str, cores: set[int]) -> Side:
    """Return a side of the rows ``loop``: one process with one thread for each of ``cores``."""
    threads = {"OMP_NUM_THREADS": str(len(cores))}
    command = [str(NODE_PYTHON), str(HERE / script), "--steps", "300"]
    return lambda _: speed(run(command, threads, cores).splitlines()[-1])


MICRO_BATCHES, STAGES = 8, 2


def stages_side(stages: int, cores: set[int]) -> float:
    """Return the steps per second of a network in so many stages, on these cores, one thread for each."""
    command = [str(NODE_PYTHON), str(HERE / "pipeline_loop.py"), "--stages", str(stages)]
    report = run([*command, "--micro-batches", str(MICRO_BATCHES)], {"OMP_NUM_THREADS": "1"}, cores).splitlines()[-1]
    print(f"    {stages} stage{'s' if stages > 1 else ''} on cores {sorted(cores)}: {report}", flush=True)
    return speed(report)


def servers_side(side: str, cores: set[int]) -> Side:
    """Return a side of the row ``kvstore``: two workers and a server, on these cores."""
    command = [str(NODE_PYTHON), str(HERE / "kvstore_world.py"), side]
    return lambda _: speed(run(command, cores=cores).splitlines()[-1])


def pipeline_bound(cores: list[int]) -> Side:
    """Return the peer of ``pipeline``: what two processes that share nothing reach, less the schedule's own idle turns.

    GPipe and 1F1B are idle for ``s - 1`` of ``m + s - 1`` turns, so no pipeline can do more.
    """
    share = MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)

    def side(_: int) -> float:
        with ThreadPoolExecutor(STAGES) as pool:
            return share * sum(pool.map(lambda core: stages_side(1, {core}), cores[:STAGES]))

    return side


THREADS = {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1.0", "HOROVOD_FUSION_THRESHOLD": str(64 << 20)}
"""What both sides of ``overhead`` get; the values are those of a job that says nothing about them."""


def under_horovodrun(folder: Path) -> Side:
    """Return the peer of ``overhead``: two ranks of the script under bare horovodrun."""

    def side(pair: int) -> float:
        out = folder / f"horovodrun-{pair}.json"
        path = f"{NODE_PYTHON.parent}:{os.environ['PATH']}"
        script = [str(NODE_PYTHON), str(HERE / "horovod_script.py"), "--out", str(out)]
        command = [str(NODE_PYTHON), str(NODE_PYTHON.parent / "horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2"]
        run([*command, "--network-interface", "lo", *script], {**THREADS, "PATH": path})
        return speed(out.read_text())

    return side


def under_mxdist(folder: Path, tracking_uri: str) -> Side:
    """Return our side of ``overhead``: the same script as a job whose run is recorded in MLflow."""

    def side(pair: int) -> float:
        out = folder / f"mxdist-{pair}.json"
        job = {
            "name": "overhead",
            "script": {"path": str(HERE / "horovod_script.py"), "args": ["--out", str(out)]},
            "parallelism": {"world_size": 2, "cycle_time_ms": 1.0, "fusion_threshold_mb": 64},
            "cluster": {"pin_cores": False, "threads_per_rank": 1, "workdir": str(folder / "jobs")},
            "tracking": {"uri": tracking_uri, "experiment": "overhead"},
        }
        path = folder / f"job-{pair}.json"
        path.write_text(json.dumps(job))
        command = [str(CONTROL / "python"), "-m", "mxdist.cli", "run", str(path), "--runs", str(folder / "runs")]
        run([*command, "--key", f"overhead-{pair}"], {"MXDIST_NODE_PYTHON": str(NODE_PYTHON)})
        return speed(out.read_text())

    return side


BENCH_PYTHON = Path(os.environ.get("MXDIST_BENCH_PYTHON", ROOT / ".mxdist/bench/bin/python"))
SCALING_STEPS = ["--steps", "60"]
TWO_CORES = set(sorted(os.sched_getaffinity(0))[:2])


def scaling_side(_: int) -> float:
    """Return the steps per second of two ranks under our plan."""
    script = [str(NODE_PYTHON), str(HERE / "scaling_loop.py"), "--side", "mxdist", *SCALING_STEPS]
    return speed(run(script, {"OMP_NUM_THREADS": "1"}, TWO_CORES).splitlines()[-1])


def bare_horovodrun(_: int) -> float:
    """Return the steps per second of two ranks of a plain loop under horovodrun with its defaults."""
    path = f"{NODE_PYTHON.parent}:{os.environ['PATH']}"
    script = [str(NODE_PYTHON), str(HERE / "scaling_loop.py"), "--side", "horovod", *SCALING_STEPS]
    command = [str(NODE_PYTHON), str(NODE_PYTHON.parent / "horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2"]
    printed = run([*command, "--network-interface", "lo", *script], {"OMP_NUM_THREADS": "1", "PATH": path}, TWO_CORES)
    return speed(next(line[line.index("{") :] for line in printed.splitlines() if '"seconds"' in line))


def torch_side(_: int) -> float:
    """Return the steps per second of two ranks under PyTorch's DistributedDataParallel over Gloo."""
    command = [str(BENCH_PYTHON), str(HERE / "torch_loop.py"), *SCALING_STEPS]
    return speed(run(command, {"OMP_NUM_THREADS": "1"}, TWO_CORES).splitlines()[-1])


def make_bench_environment() -> None:
    """Make the environment of PyTorch, unless it is there."""
    if BENCH_PYTHON.exists():
        return
    print(f"installing PyTorch into {BENCH_PYTHON.parents[1]} (large)", flush=True)
    run([sys.executable, "-m", "venv", str(BENCH_PYTHON.parents[1])])
    run([str(BENCH_PYTHON), "-m", "pip", "install", "--quiet", "-r", str(ROOT / "requirements-bench.txt")])


GOALS = {"scaling": 1.15, "peer": 1.1}
PROGRAMS = ("ssh_start", "recover")
"""Rows that are programs of their own."""

MEMORY = {"memory_resnet152": "resnet152", "memory_bert_base": "bert_base"}


def measure_memory(row: str) -> bool:
    """Train a big network, kill it and go on; return whether the estimate is within 25 %, and weights stay."""
    print(
        f"{row}: a big network through mxdist's loop, killed and gone on with, beside the plan's estimate", flush=True
    )
    script = [str(NODE_PYTHON), str(HERE / "memory_loop.py"), "--model", MEMORY[row]]
    found = json.loads(run(script, {"OMP_NUM_THREADS": "2"}).splitlines()[-1])
    good = bool(found["same_weights"])
    for name in ("peak", "checkpoint"):
        measured, expected = found[name] / 2**20, found[f"estimated_{name}"] / 2**20
        ratio = expected / measured
        good &= 0.75 <= ratio <= 1.25
        print(f"  {name}: measured {measured:.0f} MiB, estimated {expected:.0f} MiB, ratio {ratio:.3f}")
    print(f"  saved in {found['save_s']:.1f} s, resumed in {found['resume_s']:.1f} s, same: {found['same_weights']}")
    ratio = round(found["estimated_peak"] / found["peak"], 3)
    print(json.dumps({"row": row, "ratio": ratio, "goal": [0.75, 1.25], "ok": good}))
    return good


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Yield the address of an MLflow server that lives as long as the block."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from stack.mlflow import Mlflow

    server = Mlflow(folder, program=str(CONTROL / "mlflow"))
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def measure(name: str, row: Row, pairs: int) -> bool:
    """Run the pairs, print each and the verdict; return whether the goal was reached."""
    print(f"{name}: {row.about}", flush=True)
    ratios = []
    for pair in range(pairs + 1):
        peer, ours = row.peer(pair), row.ours(pair)
        counts = "warm-up, not counted" if pair == 0 else f"pair {pair}"
        print(f"  {counts}: peer {peer:.2f} steps/s, mxdist {ours:.2f} steps/s, ratio {ours / peer:.3f}", flush=True)
        if pair:
            ratios.append(ours / peer)
    ratio = statistics.median(ratios)
    print(f"  median {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f} over {pairs} pairs")
    ok = ratio >= row.goal
    print(json.dumps({"row": name, "ratio": round(ratio, 3), "goal": row.goal, "ok": ok}))
    return ok


def rows(name: str, folder: Path) -> Row:
    """Return the row of this name; services that it needs are started by ``main``."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if name == "overhead":
        about = "a Horovod script on two ranks, under mxdist with tracking on, over bare horovodrun"
        return Row(about, under_mxdist(folder, os.environ["MLFLOW_TRACKING_URI"]), under_horovodrun(folder), 0.98)
    if name == "pipeline":
        about = f"two stages on two ranks, over the bound for {MICRO_BATCHES} micro-batches of two unrelated processes"
        return Row(about, lambda _: stages_side(STAGES, set(cores)), pipeline_bound(cores), 0.8)
    if name == "kvstore":
        about = "two workers with dist_sync, mxdist's loop over a plain Gluon loop, the guide's CIFAR CNN"
        return Row(about, servers_side("mxdist", set(cores)), servers_side("plain", set(cores)), 1.0)
    if name in ("scaling", "peer"):
        peer, what = (
            (bare_horovodrun, "bare horovodrun") if name == "scaling" else (torch_side, "PyTorch DDP over Gloo")
        )
        return Row(f"two ranks of ResNet-18, 64 x 64, batch 16 each, over {what}", scaling_side, peer, GOALS[name])
    chosen, goal = (set(cores), 1.2) if name == "loop" else ({cores[0]}, 2.5)
    about = f"mxdist's loop over a plain Gluon loop on {len(chosen)} core(s), the guide's CIFAR CNN"
    return Row(about, loop_side("mxdist_loop.py", chosen), loop_side("plain_loop.py", chosen), goal)


ROWS = ["loop", "loop_pinned", "overhead", "pipeline", "kvstore", "scaling", "peer"]


def main() -> int:
    """Measure one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=[*ROWS, *MEMORY, *PROGRAMS])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if options.row in PROGRAMS:
        script = [str(CONTROL / "python"), str(HERE / f"{options.row}.py"), "--pairs", str(options.pairs)]
        return subprocess.run(script, check=False).returncode
    if options.row in MEMORY:
        return 0 if measure_memory(options.row) else 1
    if options.row == "peer":
        make_bench_environment()
    with tempfile.TemporaryDirectory(prefix="mxdist-bench-") as scratch:
        folder = Path(scratch)
        if options.row != "overhead":
            return 0 if measure(options.row, rows(options.row, folder), options.pairs) else 1
        with mlflow_server(folder) as uri:
            os.environ["MLFLOW_TRACKING_URI"] = uri
            return 0 if measure(options.row, rows(options.row, folder), options.pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
