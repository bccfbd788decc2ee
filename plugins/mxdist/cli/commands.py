"""``mxdist``: the same jobs as in Airflow, from a file, without Airflow."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mxdist
from mxdist.cli import plan, preflight, prune, setting, stage
from mxdist.cli.follow import Follower, describe_progress, describe_result, exit_code, told_since
from mxdist.errors import MxdistError, NotFound
from mxdist.launch import JobClient
from mxdist.reconcile import finish_all
from mxdist.spec import Job, job_schema
from mxdist.store import Attempt, JobRun

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return what the process should exit with.

    :raises KeyboardInterrupt: Ctrl-C, and nothing is left to do about it.
    """
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except MxdistError as error:
        print(f"mxdist: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def schema(options: argparse.Namespace) -> int:
    """Print the JSON Schema of a job file."""
    print(json.dumps(job_schema(), indent=2))
    return 0


def submit(options: argparse.Namespace) -> int:
    """Start a job, or find it running, and leave it to itself."""
    attempt, how = _submit(options, *_client(options))
    print(f"{attempt.claim.job_key} attempt {attempt.number}: {how}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Start a job, or find it running, follow it to its end, and tell by the exit code how it ended."""
    job, client = _client(options)
    attempt: Attempt | None = None
    follower: Follower | None = None
    try:
        attempt, how = _submit(options, job, client)
        print(f"mxdist: {attempt.claim.job_key} attempt {attempt.number} {how}", file=sys.stderr)
        follower = Follower(client, attempt, revive=partial(_revive, client, attempt))
        result = follower.until_end()
    except KeyboardInterrupt:
        print("mxdist: cancelling; once more Ctrl-C leaves the job to its supervisor", file=sys.stderr)
        attempt = attempt or _interrupted(options, job, client)
        follower = follower or Follower(client, attempt)  # the same goes on: it knows what was printed
        result = client.cancel(attempt, by="cli", reason="Ctrl-C")
    follower.print_new()
    attempt.hand_over()
    client.forget(attempt)
    print(describe_result(attempt, result), file=sys.stderr)
    return exit_code(result.state)


def status(options: argparse.Namespace) -> int:
    """Print how a job stands, or all jobs of the store."""
    client = setting.client_of_job(options)
    if options.job is None:
        _print_all(client, as_json=options.json)
        return 0
    attempt = setting.attempt(options, client)
    result, state = attempt.result(), attempt.read_state()
    if options.json:
        told = {"claim": attempt.claim.dump(), "state": state.dump(), "result": None}
        if result is not None:
            told["result"] = told_since(attempt, result).dump()
        print(json.dumps(told, indent=2))
    elif result is not None:
        print(describe_result(attempt, result))
    else:
        age = f"heartbeat {time.time() - state.heartbeat:.0f} s ago"
        if not state.heartbeat:
            age = f"no supervisor has begun yet, {time.time() - attempt.claim.submitted_at:.0f} s after its submission"
        print(f"{attempt.claim.job_key} attempt {attempt.number}: {describe_progress(state)} | {age}")
    return 0


def logs(options: argparse.Namespace) -> int:
    """Print a job's log."""
    client = setting.client_of_job(options)
    follower = Follower(client, setting.attempt(options, client), progress=None)
    if options.follow:
        follower.until_end()
    follower.print_new()
    return 0


def cancel(options: argparse.Namespace) -> int:
    """End a job; return only when nothing of it is left."""
    client = setting.client_of_job(options)
    attempt = setting.attempt(options, client)
    result = client.cancel(attempt, by="cli", reason=options.reason)
    print(describe_result(attempt, result))
    return 0


def reconcile_all(options: argparse.Namespace) -> int:
    """Finish what others left undone."""
    good = True
    for step in finish_all(setting.client(options)):
        print(step.message)
        good &= step.good
    return 0 if good else 1


def _client(options: argparse.Namespace) -> tuple[Job, JobClient]:
    job = setting.job(options)
    return job, setting.client(options, job)


def _submit(options: argparse.Namespace, job: Job, client: JobClient) -> tuple[Attempt, str]:
    key = setting.job_key(options, job)
    if JobRun(client.runs, key).latest() is None:  # one that began once is found, whatever became of its dataset
        _check_dataset(job)
    submission = client.submit(job, key, source=setting.source(), secrets=setting.secrets())
    return submission.attempt, submission.how


def _check_dataset(job: Job) -> None:
    from mxdist.data.manifest import load_manifest

    if job.dataset is not None:
        load_manifest(job.dataset.manifest_uri, job.dataset.version, storage=job.storage)


def _interrupted(options: argparse.Namespace, job: Job, client: JobClient) -> Attempt:
    """Return the attempt that runs, after a Ctrl-C in the middle of its submission.

    :raises KeyboardInterrupt: nothing was started; what has ended before is not what was interrupted.
    """
    try:
        attempt = client.attempt(setting.job_key(options, job))
    except NotFound:
        raise KeyboardInterrupt from None
    if attempt.result() is not None:
        raise KeyboardInterrupt
    return attempt


def _revive(client: JobClient, attempt: Attempt) -> None:
    print("mxdist: the supervisor is gone; starting the next one", file=sys.stderr)
    client.revive(attempt, setting.secrets())


def _print_all(client: JobClient, *, as_json: bool) -> None:
    rows = []
    for key in client.job_keys():
        with contextlib.suppress(MxdistError):  # claimed by nobody yet, or removed
            attempt = client.attempt(key)
            rows.append((key, attempt.number, client.state(attempt).value))
    if as_json:
        print(
            json.dumps([{"job_key": key, "attempt": number, "state": state} for key, number, state in rows], indent=2)
        )
        return
    width = max([len("job key"), *(len(row[0]) for row in rows)])
    print(f"{'job key':<{width}}  attempt  state")
    for key, number, state in rows:
        print(f"{key:<{width}}  {number:<7}  {state}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mxdist", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=mxdist.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, "schema", schema)
    stage.takes(_add(commands, "stage", stage.stage))
    for name, command in (("plan", plan.plan), ("preflight", preflight.preflight), ("submit", submit), ("run", run)):
        one = _add(commands, name, command)
        _takes_file(one)
        _takes_places(one)
        if name == "preflight":
            preflight.takes(one)
        if name == "plan":
            plan.takes(one)
    for name, command in (("status", status), ("logs", logs), ("cancel", cancel)):
        one = _add(commands, name, command)
        _takes_job(one, optional=name == "status")
        _takes_places(one)
        if name == "status":
            one.add_argument("--json", action="store_true", help="as JSON")
        if name == "logs":
            one.add_argument("--follow", "-f", action="store_true", help="go on until the job ends")
        if name == "cancel":
            one.add_argument("--reason", default="asked on the command line", help="kept with the job")
    _takes_places(_add(commands, "reconcile", reconcile_all))
    prune.takes(_add(commands, "prune", prune.prune))
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, command: Command
) -> argparse.ArgumentParser:
    about = (command.__doc__ or "").strip()
    parser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(command=command)
    return parser


def _takes_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB.yaml", help="the job file, YAML or JSON")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a field of the job")
    _takes_dataset(parser, "what `mxdist stage` printed: the dataset")
    parser.add_argument("--key", help="job key; default: the job's name and digest")


def _takes_job(parser: argparse.ArgumentParser, *, optional: bool) -> None:
    parser.add_argument("job", nargs="?" if optional else None, metavar="JOB", help="a job key, or a job file")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as given to run or submit")
    _takes_dataset(parser, "as given to run or submit")
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the newest")


def _takes_dataset(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--dataset-from", type=Path, metavar="FILE", help=about)


def _takes_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", metavar="URI", help="run store; default: $MXDIST_RUNS_URI, else a private folder")
    parser.add_argument("--workdir", metavar="FOLDER", help="scratch folder; default: $MXDIST_WORKDIR")
    parser.add_argument("--endpoint-url", metavar="URL", help="S3 server other than AWS")
