"""A preflight of a Kubernetes cluster: whether it would take a job, and let us do what a job needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from mxdist.errors import LaunchError
from mxdist.launch.findings import Finding
from mxdist.launch.kubernetes_api import KubernetesApi
from mxdist.launch.mpijob import GROUP, PLURAL

CLUSTER = "(cluster)"
"""The row of the cluster itself."""

RIGHTS = (
    ("create", PLURAL, GROUP),
    ("get", PLURAL, GROUP),
    ("list", PLURAL, GROUP),
    ("watch", PLURAL, GROUP),
    ("delete", PLURAL, GROUP),
    ("list", "pods", ""),
    ("delete", "pods", ""),
)
"""Verb, resource and group of what a launcher does. It also creates Secrets, unless the job names one."""

SECRET_RIGHT = ("create", "secrets", "")
_FACTORS = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12, "P": Decimal(10) ** 15, "E": Decimal(10) ** 18, "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30, "Ti": Decimal(2) ** 40, "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}  # fmt: skip
_QUANTITY = re.compile(r"^([0-9.]+)([A-Za-z]*)$")


def findings(api: KubernetesApi, manifest: Mapping[str, Any], *, makes_secret: bool) -> Iterator[Finding]:
    """Yield what is right and wrong with a cluster for an MPIJob; nothing is created.

    :param makes_secret: keys are to travel, and the job names no Secret.
    """
    try:
        yield Finding(CLUSTER, "server", api.version())
        known = api.serves_jobs()
    except LaunchError as error:
        yield Finding(CLUSTER, "server", "no", str(error))
        return
    missing = (
        "let the administrator install Kubeflow's mpi-operator; the cluster knows no MPIJob of kubeflow.org/v2beta1"
    )
    yield Finding(CLUSTER, "mpijob", "yes" if known else "no", "" if known else missing)
    namespace = manifest["metadata"]["namespace"]
    yield _rights(api, namespace, makes_secret)
    if known:
        yield _admission(api, manifest)
    yield _quota(api, manifest)


def demand(manifest: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what an MPIJob takes of a quota, by the quota's names: pods, requests.cpu, limits.memory and so on."""
    total: dict[str, Decimal] = {f"count/{PLURAL}.{GROUP}": Decimal(1), "pods": Decimal(0), "count/pods": Decimal(0)}
    for role in manifest["spec"]["mpiReplicaSpecs"].values():
        count = Decimal(role["replicas"])
        total["pods"] += count
        total["count/pods"] += count
        container = role["template"]["spec"]["containers"][0]
        for kind in ("requests", "limits"):
            for name, quantity in container.get("resources", {}).get(kind, {}).items():
                total[f"{kind}.{name}"] = total.get(f"{kind}.{name}", Decimal(0)) + count * amount(quantity)
    for name in ("cpu", "memory"):  # a quota may leave "requests." away
        total[name] = total.get(f"requests.{name}", Decimal(0))
    return total


def amount(quantity: str) -> Decimal:
    """Return the number that a quantity stands for: 0.5 for ``500m``, 2147483648 for ``2Gi``."""
    found = _QUANTITY.match(quantity)
    if found is None or found[2] not in _FACTORS:
        raise ValueError(f"{quantity!r} is no quantity")
    return Decimal(found[1]) * _FACTORS[found[2]]


def _rights(api: KubernetesApi, namespace: str, makes_secret: bool) -> Finding:
    needed = [*RIGHTS, *([SECRET_RIGHT] if makes_secret else [])]
    lacking = [f"{verb} {what}" for verb, what, group in needed if not api.may(namespace, verb, what, group=group)]
    problem = f"we may not {', '.join(lacking)} in namespace {namespace}: docs/kubernetes.md has the rules to grant"
    return Finding(CLUSTER, "rights", "no" if lacking else "yes", problem if lacking else "")


def _admission(api: KubernetesApi, manifest: Mapping[str, Any]) -> Finding:
    """The server does all but keep it: admission policies, quotas of objects, and the fields that it knows."""
    try:
        api.create_job(manifest, dry_run=True)
    except LaunchError as error:
        return Finding(CLUSTER, "admission", "no", str(error))
    return Finding(CLUSTER, "admission", "yes")


def _quota(api: KubernetesApi, manifest: Mapping[str, Any]) -> Finding:
    try:
        quotas = api.quotas(manifest["metadata"]["namespace"])
    except LaunchError:
        return Finding(CLUSTER, "quota", "-")  # nobody has to let us see it
    wanted, problems = demand(manifest), []
    for quota in quotas:
        hard, used = quota.get("status", {}).get("hard", {}), quota.get("status", {}).get("used", {})
        for name in sorted(hard.keys() & wanted.keys()):
            most, taken = amount(hard[name]), amount(used.get(name, "0"))
            if wanted[name] > most:
                problems.append(
                    f"{name}: the job takes {wanted[name]:f}, quota {quota['metadata']['name']} allows {most:f}"
                )
            elif wanted[name] + taken > most:
                rest = f"{most - taken:f} of {most:f} are left"
                problems.append(f"{name}: the job takes {wanted[name]:f}, of quota {quota['metadata']['name']} {rest}")
    return Finding(CLUSTER, "quota", "no" if problems else "yes", "; ".join(problems))
