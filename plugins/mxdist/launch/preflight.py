"""What a preflight asks of each host, and what its answers mean for a job. Pure: reports in, a table out."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mxdist.launch.findings import Finding
from mxdist.runtime.nics import Address, choose
from mxdist.spec.cluster import Cluster, ClusterKind
from mxdist.spec.job import BaseJob
from mxdist.spec.parallelism import Strategy

MOST_SKEW_S = 5.0
"""Clocks further apart than this make heartbeats look stale, and S3 refuse signatures from a quarter of an hour on."""

LEAST_FREE_BYTES = 512 << 20
NUMPY_BELOW = (1, 24)
_MATRIX_HOSTS = 16


@dataclass(frozen=True)
class Report:
    """What is known of one host.

    :param found: what its probe said; empty: it said nothing.
    :param error: why its probe said nothing.
    :param skew_s: its clock less ours; None: not measured.
    :param doubt_s: how far off ``skew_s`` may be.
    :param reached: by host and address "" or what happened; None: not asked.
    :param unresolved: names of other hosts, known only once all had answered, that it cannot resolve.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    skew_s: float | None = None
    doubt_s: float = 0.0
    reached: Mapping[str, Mapping[str, str]] | None = None
    unresolved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What a job needs of its hosts.

    :param hosts: their names, in order; the first one runs the supervisor.
    :param slots: ranks of each.
    :param free_bytes: needed in the scratch folder.
    :param horovod: whether its ranks talk through Horovod.
    """

    hosts: tuple[str, ...]
    slots: tuple[int, ...]
    cluster: Cluster
    devices_per_rank: int = 1
    free_bytes: int = LEAST_FREE_BYTES
    horovod: bool = True
    s3: bool = True
    mlflow: bool = False

    @classmethod
    def of(cls, job: BaseJob, places: Sequence[Any], *, runs_uri: str, data_bytes: int = 0) -> Wanted:
        """Return what ``job`` needs.

        :param places: its hosts, as ``launch.hosts.place`` returns them.
        :param data_bytes: the size of its dataset.
        """
        parallelism = job.parallelism
        return cls(
            hosts=tuple(host.name for host in places),
            slots=tuple(host.slots for host in places),
            cluster=job.cluster,
            devices_per_rank=parallelism.devices_per_rank,
            free_bytes=LEAST_FREE_BYTES + 2 * data_bytes,
            horovod=parallelism.world_size > 1 and parallelism.strategy is not Strategy.PARAMETER_SERVER,
            s3=runs_uri.startswith("s3://"),
            mlflow=job.tracking.uri is not None,
        )


def request_of(
    job: BaseJob,
    *,
    runs_uri: str,
    hosts: Sequence[str],
    nonce: str,
    token: str | None,
    reads: Sequence[str],
    secrets: Mapping[str, str],
) -> dict[str, Any]:
    """Return what every probe is asked; see ``runtime/probe.py``.

    :param nonce: names this preflight in the run store.
    :param token: what the submitter wrote there under this name; None: it could not.
    :param reads: documents that the job starts from.
    """
    request: dict[str, Any] = {
        "workdir": job.cluster.workdir,
        "names": [name for name in hosts if not _is_address(name) and not name.startswith("<")],
        "interface": job.cluster.interface,
        "network": len(hosts) > 1,
        "runs": {"uri": runs_uri, "nonce": nonce, "token": token},
        "reads": list(reads),
        "storage": job.storage.to_document(),
        "secrets": dict(secrets),
    }
    if job.tracking.uri is not None:
        request["mlflow"] = {"uri": job.tracking.uri, "experiment": job.tracking.experiment}
    return request


def judge(wanted: Wanted, reports: Mapping[str, Report]) -> tuple[Finding, ...]:
    """Return what the reports of all hosts mean, host by host in the job's order."""
    answering = {host: reports[host] for host in wanted.hosts if host in reports and not reports[host].error}
    usual = _usual_versions(answering)
    chosen = _networks(answering) if len(wanted.hosts) > 1 else {}
    findings: list[Finding] = []
    for number, host in enumerate(wanted.hosts):
        report = reports.get(host, Report(error="was not looked at"))
        if report.error:
            findings.append(Finding(host, "login", "no", report.error))
            continue
        findings.append(Finding(host, "login", "ok"))
        for judged in _EACH:
            findings += judged(host, report, wanted)
        findings.append(_versions(host, report, wanted, usual))
        findings.append(_devices(host, report, wanted, answering, wanted.slots[number]))
        if len(wanted.hosts) > 1:
            findings.append(_network(host, answering, chosen, wanted.cluster.interface))
    return tuple(findings)


def matrix(wanted: Wanted, reports: Mapping[str, Report]) -> tuple[str, ...]:
    """Return who reaches whom, drawn; nothing when all do, or when there are too many hosts for it."""
    hosts = [host for host in wanted.hosts if host in reports and not reports[host].error]
    width = max(len(word) for word in ("reaches", *hosts))
    cells = {(a, b): _reaches(reports, a, b) for a in hosts for b in hosts if a != b}
    if len(hosts) > _MATRIX_HOSTS or all(cells.values()):
        return ()
    rows = [f"{'reaches'.ljust(width)}  " + "  ".join(hosts)]
    for a in hosts:
        marks = ["." if a == b else "ok" if cells[a, b] else "no" for b in hosts]
        row = "  ".join(mark.ljust(len(host)) for mark, host in zip(marks, hosts, strict=True))
        rows.append(f"{a.ljust(width)}  {row}".rstrip())
    return tuple(rows)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _error(report: Report, name: str) -> str:
    """Return what went wrong with a check of the probe, "" if nothing did."""
    found = report.found.get(name)
    return str(found["error"]) if isinstance(found, Mapping) and "error" in found else ""


def _names(host: str, report: Report, wanted: Wanted) -> Iterator[Finding]:
    if error := _error(report, "names"):
        yield Finding(host, "names", "?", f"resolving the names of the hosts: {error}")
    elif missing := list(dict.fromkeys([*report.found["names"], *report.unresolved])):
        hint = "a name that a rank cannot resolve crashes Horovod; add it to DNS or to /etc/hosts there"
        yield Finding(host, "names", f"{len(missing)} missing", f"cannot resolve {', '.join(missing)}: {hint}")
    else:
        yield Finding(host, "names", "ok")


def _clock(host: str, report: Report, wanted: Wanted) -> Iterator[Finding]:
    if report.skew_s is None:
        return
    told = f"{report.skew_s:+.1f} s"
    if abs(report.skew_s) - report.doubt_s <= MOST_SKEW_S:
        yield Finding(host, "clock", told)
        return
    which = "ahead of" if report.skew_s > 0 else "behind"
    problem = f"{abs(report.skew_s):.1f} s {which} the submitter's; synchronise the clocks (chrony, systemd-timesyncd)"
    yield Finding(host, "clock", told, problem)


def _disk(host: str, report: Report, wanted: Wanted) -> Iterator[Finding]:
    if error := _error(report, "disk"):
        yield Finding(host, "disk", "no", error)
        return
    free, folder = report.found["disk"]["free_bytes"], report.found["disk"]["folder"]
    short = free < wanted.free_bytes
    problem = f"{_size(free)} free in {folder}; the job needs {_size(wanted.free_bytes)}" if short else ""
    yield Finding(host, "disk", _size(free), problem)


def _store(host: str, report: Report, wanted: Wanted) -> Iterator[Finding]:
    if error := _error(report, "runs"):
        yield Finding(host, "store", "no", f"the run store cannot be written and read: {error}")
    elif "runs" in report.found:
        yield Finding(host, "store", f"{report.found['runs']['took_s'] * 1000:.0f} ms")
    if error := _error(report, "reads"):
        yield Finding(host, "data", "no", f"what the job starts from cannot be read: {error}")
    elif "reads" in report.found:
        yield Finding(host, "data", "ok")


def _mlflow(host: str, report: Report, wanted: Wanted) -> Iterator[Finding]:
    if error := _error(report, "mlflow"):
        yield Finding(host, "mlflow", "no", error)
    elif "mlflow" in report.found:
        yield Finding(host, "mlflow", "ok")


def _deep(host: str, report: Report, wanted: Wanted) -> Iterator[Finding]:
    if error := _error(report, "deep"):
        yield Finding(host, "mxnet", "no", f"MXNet cannot be used: {error}")
    elif "deep" in report.found:
        yield Finding(host, "mxnet", f"{report.found['deep']['import_s']:.1f} s")


_Judge = Callable[[str, Report, Wanted], Iterator[Finding]]
_EACH: tuple[_Judge, ...] = (_names, _clock, _disk, _store, _mlflow, _deep)


def _usual_versions(reports: Mapping[str, Report]) -> dict[str, str]:
    """Return for each part the version that most hosts have, the first host's where there are as many of another."""
    every = [report.found["versions"] for report in reports.values() if not _error(report, "versions")]
    parts = dict.fromkeys(part for found in every for part in found)
    return {part: Counter(found.get(part, "") for found in every).most_common(1)[0][0] for part in parts}


def _versions(host: str, report: Report, wanted: Wanted, usual: Mapping[str, str]) -> Finding:
    if error := _error(report, "versions"):
        return Finding(host, "versions", "?", error)
    found: Mapping[str, str] = report.found["versions"]
    wrong = [
        f"{part} {found[part]}, the others have {version or 'none'}" if part in found else f"no {part} {version}"
        for part, version in usual.items()
        if found.get(part, "") != version
    ]
    wrong += _unusable(found, wanted)
    told = f"mxnet {found['mxnet']}" if "mxnet" in found else "no mxnet"
    return Finding(host, "versions", told, "; ".join(dict.fromkeys(wrong)))


def _unusable(found: Mapping[str, str], wanted: Wanted) -> Iterator[str]:
    needed = ["mxnet", "pydantic", *(["horovod"] if wanted.horovod else []), *(["boto3"] if wanted.s3 else [])]
    missing = [part for part in needed if part not in found]
    if missing:
        yield f"the node environment has no {', no '.join(missing)} (requirements-node.txt)"
    numpy = found.get("numpy", "0.0").split(".")
    if [int(part) for part in numpy[:2] if part.isdecimal()] >= list(NUMPY_BELOW):
        yield f"numpy {found['numpy']}; MXNet needs one below {'.'.join(map(str, NUMPY_BELOW))}"


def _devices(host: str, report: Report, wanted: Wanted, reports: Mapping[str, Report], slots: int) -> Finding:
    if error := _error(report, "gpus"):
        return Finding(host, "devices", "?", error)
    gpus: Sequence[str] = report.found["gpus"]
    most = max((len(one.found["gpus"]) for one in reports.values() if not _error(one, "gpus")), default=0)
    need = max(_asked_gpus(wanted.cluster), slots * wanted.devices_per_rank if most else 0)
    told = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}" if gpus else "cpu"
    if len(gpus) >= need:
        return Finding(host, "devices", told)
    why = f"{slots} rank{'s' if slots != 1 else ''} of {wanted.devices_per_rank} each"
    return Finding(host, "devices", told, f"{len(gpus)} GPUs; the job needs {need} here ({why})")


def _asked_gpus(cluster: Cluster) -> int:
    if cluster.kind is ClusterKind.KUBERNETES:
        return cluster.kubernetes.gpus_per_worker
    asked = (cluster.slurm.gpus_per_node or "").rpartition(":")[2]
    return int(asked) if cluster.kind is ClusterKind.SLURM and asked.isdecimal() else 0


def _networks(reports: Mapping[str, Report]) -> dict[str, Address | None]:
    """Return the address at which the others meet each host, as a run would choose it; None where there is none."""
    hosts = [host for host, report in reports.items() if not _error(report, "network")]
    usable = [_usable(reports[host]) for host in hosts]
    reached = {
        (number, one.address): {
            other for other, name in enumerate(hosts) if not _told(reports[name], host, one.address)
        }
        for number, host in enumerate(hosts)
        for one in usable[number]
    }
    needed = [{other for other in range(len(hosts)) if other != number} for number in range(len(hosts))]
    return dict(zip(hosts, choose(usable, reached, needed), strict=True))


def _usable(report: Report) -> list[Address]:
    return [Address(*one) for one in report.found["network"]["usable"]]


def _network(
    host: str, reports: Mapping[str, Report], chosen: Mapping[str, Address | None], interface: str | None
) -> Finding:
    """Judge whether there is one address of this host at which every other host that answers can reach it."""
    if error := _error(reports[host], "network"):
        return Finding(host, "network", "?", error)
    usable = [one.address for one in _usable(reports[host])]
    if not usable:
        where = f"no address on {interface}" if interface else "no address but loopback"
        every = ", ".join(f"{device} {address}" for device, address, _ in reports[host].found["network"]["every"])
        return Finding(host, "network", "none", f"{where}; it has {every or 'none'}")
    if (good := chosen[host]) is not None:
        return Finding(host, "network", good.address)
    cut = []
    for other, report in reports.items():
        told = {address: _told(report, host, address) for address in usable}
        if other != host and all(told.values()):
            cut.append(f"{other} does not reach it ({'; '.join(f'{at}: {what}' for at, what in told.items())})")
    if not cut:
        problem = f"no one of {', '.join(usable)} is reached by all; set cluster.interface"
        return Finding(host, "network", "mixed", problem)
    hint = "open the TCP ports between the hosts, or set cluster.interface"
    return Finding(host, "network", "cut", f"{'; '.join(cut)}; {hint}")


def _told(report: Report, host: str, address: str) -> str:
    """Return "" if a host reached another at an address, else what happened."""
    if report.reached is None:
        return "did not say in time"
    return report.reached.get(host, {}).get(address, "was not tried")


def _reaches(reports: Mapping[str, Report], a: str, b: str) -> bool:
    if _error(reports[b], "network"):
        return False
    return any(not _told(reports[a], b, one.address) for one in _usable(reports[b]))


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
