"""What the answers of hosts mean for a job: every problem named, with the host and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from mxdist.launch.findings import Preflight
from mxdist.launch.hosts import place
from mxdist.launch.preflight import Report, Wanted, judge, matrix, request_of
from mxdist.spec import parse_job
from mxdist.spec.cluster import Cluster

HOSTS = ("node1", "node2", "node3")
VERSIONS = {"python": "3.11.7", "mxnet": "1.9.1", "build": "mxnet", "horovod": "0.28.1", "numpy": "1.23.5",
            "boto3": "1.44.8", "pydantic": "2.14.4"}  # fmt: skip


def network(*usable: list[Any]) -> dict[str, Any]:
    return {"every": [["lo", "127.0.0.1", 8], *usable], "usable": list(usable)}


def found(number: int, **other: Any) -> dict[str, Any]:
    """What the probe of a healthy node says."""
    healthy = {
        "versions": VERSIONS,
        "gpus": [],
        "network": network(["eth0", f"10.0.0.{number}", 24], ["docker0", "172.17.0.1", 16]),
        "names": [],
        "disk": {"folder": "/scratch", "free_bytes": 50_000_000_000},
        "runs": {"took_s": 0.012},
    }
    return {**healthy, **other}


def reaching(number: int, **cut: dict[str, str]) -> dict[str, dict[str, str]]:
    """Whom a healthy node reaches: docker0 is itself everywhere."""
    others = {f"node{other}": other for other in (1, 2, 3) if other != number}
    seen = {name: {f"10.0.0.{other}": "", "172.17.0.1": "another host answers there"} for name, other in others.items()}
    return {**seen, **cut}


def reports(**changed: Report) -> dict[str, Report]:
    healthy = {f"node{n}": Report(found(n), skew_s=0.01, doubt_s=0.002, reached=reaching(n)) for n in (1, 2, 3)}
    return {**healthy, **changed}


def wanted(**more: Any) -> Wanted:
    cluster = Cluster.parse({"kind": "ssh", "hosts": list(HOSTS), **more.pop("cluster", {})})
    return Wanted(HOSTS, (1, 1, 1), cluster, **more)


def problems(changed: dict[str, Report], **more: Any) -> list[tuple[str, str, str]]:
    return [(one.host, one.check, one.problem) for one in judge(wanted(**more), reports(**changed)) if one.problem]


def test_a_healthy_place_has_no_problem_and_one_row_a_host() -> None:
    findings = judge(wanted(), reports())
    table = Preflight("three hosts", findings).describe().splitlines()
    assert table[0] == "three hosts"
    assert table[2].split() == ["host", "login", "names", "clock", "disk", "store", "versions", "devices", "network"]
    assert table[3].split() == ["node1", "ok", "ok", "+0.0", "s", "50.0", "GB", "12", "ms", "mxnet", "1.9.1", "cpu",
                                "10.0.0.1"]  # fmt: skip
    assert table[-1] == "no problems"
    assert matrix(wanted(), reports()) == ()


@pytest.mark.parametrize(
    ("report", "check", "told"),
    [
        (Report(error="no answer in 10 s"), "login", "no answer in 10 s"),
        (Report(found(2, names=["node3"])), "names", "cannot resolve node3: a name that a rank cannot resolve crashes"),
        (Report(found(2, names={"error": "no answer in 7 s"})), "names", "no answer in 7 s"),
        (Report(found(2), skew_s=-42.0, doubt_s=0.1), "clock", "42.0 s behind the submitter's"),
        (Report(found(2), skew_s=7.0, doubt_s=0.1), "clock", "7.0 s ahead of the submitter's"),
        (
            Report(found(2, disk={"folder": "/scratch", "free_bytes": 10_000_000})),
            "disk",
            "0.0 GB free in /scratch; the job needs 0.5 GB",
        ),
        (
            Report(found(2, disk={"folder": "/s", "error": "cannot write to /s: No space left on device"})),
            "disk",
            "cannot write to /s: No space left on device",
        ),
        (
            Report(found(2, runs={"error": "Connection refused"})),
            "store",
            "the run store cannot be written and read: Connection refused",
        ),
        (
            Report(found(2, mlflow={"error": "MLflow answers 403 Forbidden: Invalid Host header"})),
            "mlflow",
            "Invalid Host header",
        ),
        (Report(found(2, deep={"error": "libcuda.so.1: cannot open"})), "mxnet", "libcuda.so.1"),
        (
            Report(found(2, versions={**VERSIONS, "numpy": "1.26.4"})),
            "versions",
            "numpy 1.26.4, the others have 1.23.5; numpy 1.26.4; MXNet needs one below 1.24",
        ),
        (Report(found(2, versions={**VERSIONS, "build": "mxnet-cu112"})), "versions", "the others have mxnet"),
        (Report(found(2, versions={**VERSIONS, "driver": "550.1"})), "versions", "driver 550.1, the others have none"),
        (
            Report(found(2, versions={key: value for key, value in VERSIONS.items() if key != "horovod"})),
            "versions",
            "no horovod 0.28.1; the node environment has no horovod",
        ),
        (Report(found(2, network=network())), "network", "no address but loopback"),
    ],
)
def test_problem_of_one_host_is_told_with_its_name(report: Report, check: str, told: str) -> None:
    given = report if report.error else Report(report.found, "", report.skew_s or 0.0, report.doubt_s, reaching(2))
    found_problems = problems({"node2": given})
    assert [(host, name) for host, name, _ in found_problems] == [("node2", check)]
    assert told in found_problems[0][2]


def test_a_clock_that_was_measured_badly_is_not_blamed() -> None:
    assert problems({"node2": Report(found(2), skew_s=7.0, doubt_s=3.0, reached=reaching(2))}) == []


def test_devices_are_counted_against_the_job() -> None:
    two = found(1, gpus=["A100", "A100"])
    given = {
        "node1": Report(two, skew_s=0.0, reached=reaching(1)),
        "node2": Report(found(2, gpus=["A100"]), skew_s=0.0, reached=reaching(2)),
        "node3": Report(found(3, gpus={"error": "nvidia-smi failed"}), skew_s=0.0, reached=reaching(3)),
    }
    told = problems(given, devices_per_rank=2)
    assert told == [
        ("node2", "devices", "1 GPUs; the job needs 2 here (1 rank of 2 each)"),
        ("node3", "devices", "nvidia-smi failed"),
    ]


def test_gpus_that_the_platform_is_asked_for_must_be_there() -> None:
    cluster = Cluster.parse({"kind": "slurm", "nodes": 1, "slurm": {"gpus_per_node": "a100:4"}})
    findings = judge(Wanted(("n1",), (1,), cluster), {"n1": Report(found(1))})
    assert [one.problem for one in findings if one.check == "devices"] == [
        "0 GPUs; the job needs 4 here (1 rank of 1 each)"
    ]


def test_cut_link_is_told_with_both_ends_and_drawn() -> None:
    refused = {"node2": {"10.0.0.2": "no answer in 3 s", "172.17.0.1": "another host answers there"}}
    given = {"node3": Report(found(3), skew_s=0.0, reached={**reaching(3), **refused})}
    told = problems(given)
    assert [(host, check) for host, check, _ in told] == [("node2", "network")]
    assert told[0][2].startswith(
        "node3 does not reach it (10.0.0.2: no answer in 3 s; 172.17.0.1: another host answers there)"
    )
    assert matrix(wanted(), reports(**given)) == (
        "reaches  node1  node2  node3",
        "node1    .      ok     ok",
        "node2    ok     .      ok",
        "node3    ok     no     .",
    )


def test_addresses_that_only_some_reach_are_no_network() -> None:
    two = network(["eth0", "10.0.0.1", 24], ["eth1", "10.1.0.1", 24])
    given = {
        "node1": Report(found(1, network=two), skew_s=0.0, reached=reaching(1)),
        "node2": Report(
            found(2), skew_s=0.0, reached={**reaching(2), "node1": {"10.0.0.1": "", "10.1.0.1": "refused"}}
        ),
        "node3": Report(
            found(3), skew_s=0.0, reached={**reaching(3), "node1": {"10.0.0.1": "refused", "10.1.0.1": ""}}
        ),
    }
    (one,) = problems(given)
    assert one == ("node1", "network", "no one of 10.0.0.1, 10.1.0.1 is reached by all; set cluster.interface")


def test_host_without_the_wanted_interface() -> None:
    none = {"every": [["lo", "127.0.0.1", 8], ["eth0", "10.0.0.2", 24]], "usable": []}
    told = problems(
        {"node2": Report(found(2, network=none), skew_s=0.0, reached=reaching(2))}, cluster={"interface": "eth1"}
    )
    assert told == [("node2", "network", "no address on eth1; it has lo 127.0.0.1, eth0 10.0.0.2")]


def test_request_names_hosts_and_what_the_job_reads_but_never_a_secret_outside_its_place() -> None:
    job = parse_job(
        {
            "name": "x",
            "model": {"name": "mlp"},
            "dataset": {"manifest_uri": "s3://b/d/manifests/1.json", "version": "0" * 64},
            "cluster": {"kind": "ssh", "hosts": ["node1", "10.0.0.7", "node3"]},
            "parallelism": {"world_size": 2},
            "batch_size": 64,
        }
    )
    names = [host.name for host in place(job)]
    request = request_of(
        job,
        runs_uri="s3://b/runs",
        hosts=names,
        nonce="n",
        reads=["s3://b/d/manifests/1.json"],
        token="t",
        secrets={"AWS_SECRET_ACCESS_KEY": "canary"},  # noqa: S106
    )
    assert request["names"] == ["node1"]  # addresses need no name, and node3 gets no rank
    assert request["reads"] == ["s3://b/d/manifests/1.json"]
    assert request.pop("secrets") == {"AWS_SECRET_ACCESS_KEY": "canary"}
    assert "canary" not in str(request)
    assert Wanted.of(job, place(job), runs_uri="s3://b/runs", data_bytes=10**9).free_bytes == (512 << 20) + 2 * 10**9
