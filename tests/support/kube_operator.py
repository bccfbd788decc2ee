"""Plays mpi-operator, garbage collector and kubelets for an API server: MPIJobs then live to their end, on test nodes.

A container has processes of its own on its node (a PID namespace, whose first process is the pod's command), the user,
the variables and the mounts that its pod says, and the files of the node image that matter. Written after the
behaviour of mpi-operator 0.6; what it does not do is a mistake here, not a feature.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.kube import Cluster
from support.node import Node
from support.nodes import Nodes
from support.places import REPOSITORY

UID = 1000
_GROUP = ("kubeflow.org", "v2beta1")
_JOB_LABEL = "training.kubeflow.org/job-name"
_LABELS = {"training.kubeflow.org/operator-name": "mpi-operator"}
_IMAGE = {
    "PATH": "/opt/node/bin:/usr/local/bin:/usr/bin:/bin",
    "MXDIST_NODE_PYTHON": "/opt/node/bin/python",
    "MXDIST_WORKDIR": "/var/lib/mxdist/jobs",
    "PYTHONUNBUFFERED": "1",
    "HOME": "/home/mxdist",
}
"""What the node image sets."""

_PERIOD_S = 0.2
_PATIENCE = 20  # errors
_LAST_WORDS = 2000


@dataclass
class Container:
    """A pod's one container, while it is there."""

    node: Node
    process: subprocess.Popen[bytes]
    log: Path
    restarts: int = 0
    doomed_at: float | None = None

    @property
    def first(self) -> int | None:
        """The id, on this machine, of the container's first process: the one below nsenter and unshare."""
        pid = self.process.pid
        for _ in range(2):
            try:
                below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except OSError:
                return None
            if not below:
                return None
            pid = int(below[0])
        return pid

    def signal(self, number: int) -> None:
        """Send a signal to the first process; without it, all others of the container are gone."""
        first = self.first
        if first is not None:
            with suppress(ProcessLookupError):
                os.kill(first, number)

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-_LAST_WORDS:]


@dataclass
class Operator:
    """Looks at all MPIJobs and pods of a namespace, some times a second, in a thread.

    What other tests have left in theirs is not its own: it would start their pods again, as after a node's restart.

    :param impostors: ends of pods' names: their sshd has another key than the job's, as of somebody in their place.
    """

    cluster: Cluster
    nodes: Nodes
    namespace: str
    folder: Path
    impostors: set[str] = field(default_factory=set)
    containers: dict[str, Container] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Work until ``stop``; then end every container.

        This thread does it: what it has started is tied to it, not to the process, and what a container's first process
        has started outlives the kernel's KILL, for that is forgotten when a process changes its user.
        """
        try:
            while not self._stopped.wait(_PERIOD_S) and len(self.errors) <= _PATIENCE:
                try:
                    self.look()
                except Exception:
                    self.errors.append(traceback.format_exc())
        finally:
            for container in self.containers.values():
                container.signal(signal.SIGKILL)
                container.process.wait(30)

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()

    def look(self) -> None:
        """Bring everything one step further."""
        jobs = self.cluster.custom.list_namespaced_custom_object(*_GROUP, self.namespace, "mpijobs")["items"]
        for job in jobs:
            self._operate(job)
        for pod in self._pods():
            self._keep(pod)
        for job in jobs:
            if "deletionTimestamp" in job["metadata"]:
                self._collect(job)

    # --- mpi-operator

    def _operate(self, job: dict[str, Any]) -> None:
        if "deletionTimestamp" in job["metadata"]:
            return
        status = job.get("status", {})
        if status.get("completionTime"):
            self._clean_up(job)
            return
        conditions = {"Created": "True"}
        policy = job["spec"]["runPolicy"]
        pods = {pod["metadata"]["name"]: pod for pod in self._pods(job)}
        launcher = next((pod for name, pod in pods.items() if "-launcher-" in name), None)
        phase = launcher["status"].get("phase") if launcher else None
        message = ""
        if policy.get("suspend"):
            conditions["Suspended"] = "True"
        elif phase in ("Succeeded", "Failed"):
            conditions[phase] = "True"
            message = f"the launcher {phase.lower()}"
        else:
            self._make_pods(job, pods)
            running = [pod for pod in pods.values() if pod["status"].get("phase") == "Running"]
            if len(running) == job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] + 1:
                conditions["Running"] = "True"
        self._tell(job, conditions, message, ended=phase in ("Succeeded", "Failed"))

    def _tell(self, job: dict[str, Any], conditions: Mapping[str, str], message: str, *, ended: bool) -> None:
        known = {one["type"]: one for one in job.get("status", {}).get("conditions", [])}
        wanted = {**{kind: "False" for kind in known if kind in ("Suspended", "Running")}, **conditions}
        if {kind: known[kind]["status"] for kind in wanted if kind in known} == wanted and not ended:
            return
        kept = [one for kind, one in known.items() if kind not in wanted]
        message = message or "as it is"
        made = [{"type": kind, "status": value, "message": message} for kind, value in wanted.items()]
        status = {"conditions": [*kept, *made], **({"completionTime": _now()} if ended else {})}
        self.cluster.set_status(job, status)

    def _make_pods(self, job: dict[str, Any], pods: Mapping[str, dict[str, Any]]) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        self._make_keys(job)
        count = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        names = [f"{name}-worker-{number}" for number in range(count)]
        for number, one in enumerate(names):
            if one not in pods:
                self._make_pod(job, "Worker", one, self.nodes[number % len(self.nodes)])
        ready = [one for one in names if one in pods and _is_ready(pods[one])]
        launched = any("-launcher-" in one for one in pods)
        waits = spec["launcherCreationPolicy"] == "WaitForWorkersReady" and len(ready) < count
        if not launched and not waits:
            self._make_pod(
                job, "Launcher", f"{name}-launcher-{uuid.uuid4().hex[:5]}", self.nodes[count % len(self.nodes)]
            )

    def _make_keys(self, job: dict[str, Any]) -> None:
        """Make the Secret and the ConfigMap that are mounted."""
        name, namespace, core = job["metadata"]["name"], job["metadata"]["namespace"], self.cluster.core
        spec = job["spec"]
        if any(one.metadata.name == f"{name}-ssh" for one in core.list_namespaced_secret(namespace).items):
            return
        private, public = _key_pair()
        data = {"ssh-privatekey": private, "ssh-publickey": public}
        lines = [
            f"{name}-worker-{number}.{name}.{namespace}.svc slots={spec['slotsPerWorker']}\n"
            for number in range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])
        ]
        owner = {"metadata": {"name": f"{name}-config", "ownerReferences": [_owner(job)]}}
        core.create_namespaced_config_map(namespace, {**owner, "data": {"hostfile": "".join(lines)}})
        secret = {
            "metadata": {"name": f"{name}-ssh", "ownerReferences": [_owner(job)]},
            "type": "kubernetes.io/ssh-auth",
        }
        core.create_namespaced_secret(namespace, {**secret, "stringData": data})

    def _make_pod(self, job: dict[str, Any], role: str, name: str, node: Node) -> None:
        replicas = job["spec"]["mpiReplicaSpecs"][role]
        template = replicas["template"]
        labels = {_JOB_LABEL: job["metadata"]["name"], **_LABELS}
        spec = {**template["spec"], "restartPolicy": replicas["restartPolicy"], "nodeName": node.name}
        metadata = {**template["metadata"], "name": name, "ownerReferences": [_owner(job)]}
        metadata["labels"] = {**template["metadata"].get("labels", {}), **labels}
        self.cluster.core.create_namespaced_pod(job["metadata"]["namespace"], {"metadata": metadata, "spec": spec})

    def _clean_up(self, job: dict[str, Any]) -> None:
        for pod in self._pods(job):
            if pod["status"].get("phase") in ("Running", "Pending") and "deletionTimestamp" not in pod["metadata"]:
                self.cluster.core.delete_namespaced_pod(pod["metadata"]["name"], pod["metadata"]["namespace"])

    # --- garbage collector

    def _collect(self, job: dict[str, Any]) -> None:
        """Delete what an MPIJob owns, and then let go of it."""
        pods = self._pods(job)
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                self.cluster.core.delete_namespaced_pod(pod["metadata"]["name"], pod["metadata"]["namespace"])
        if pods:
            return
        name, namespace, core = job["metadata"]["name"], job["metadata"]["namespace"], self.cluster.core
        for secret in core.list_namespaced_secret(namespace).items:
            if any(one.uid == job["metadata"]["uid"] for one in secret.metadata.owner_references or []):
                core.delete_namespaced_secret(secret.metadata.name, namespace)
        with _absent_is_fine():
            core.delete_namespaced_config_map(f"{name}-config", namespace)
        with _absent_is_fine():
            where = (*_GROUP, namespace, "mpijobs", name)
            self.cluster.custom.patch_namespaced_custom_object(*where, {"metadata": {"finalizers": None}})

    # --- kubelet

    def _keep(self, pod: dict[str, Any]) -> None:
        uid, container = pod["metadata"]["uid"], self.containers.get(pod["metadata"]["uid"])
        if "deletionTimestamp" in pod["metadata"]:
            self._end(pod, container)
        elif pod["status"].get("phase") in ("Succeeded", "Failed"):
            return
        elif container is None:
            self.containers[uid] = self._start(pod)
        elif container.process.poll() is not None:
            self._ended(pod, container)
        else:
            self._show(pod, "Running", ready=_probe(pod, container.node), state={"running": {"startedAt": _now()}})

    def _start(self, pod: dict[str, Any]) -> Container:
        node = next(one for one in self.nodes if one.name == pod["spec"]["nodeName"])
        furnish(node)
        self._mount(pod, node)
        container = pod["spec"]["containers"][0]
        variables = {**_IMAGE, **self._from_secrets(pod), **{one["name"]: one["value"] for one in container["env"]}}
        log = self.folder / f"{pod['metadata']['name']}.log"
        apart = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--propagation", "private"]
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs",
                   "--bounding-set=-all", "--inh-caps=-all"]  # fmt: skip
        with log.open("ab") as output:
            words, said = [*apart, *as_user, *container["command"]], output.fileno()
            process = node.popen(words, environment=variables, stdout=said, stderr=said)
        return Container(node, process, log)

    def _mount(self, pod: dict[str, Any], node: Node) -> None:
        namespace, labels, core = pod["metadata"]["namespace"], pod["metadata"]["labels"], self.cluster.core
        job = labels[_JOB_LABEL]
        manifest = self.cluster.custom.get_namespaced_custom_object(*_GROUP, namespace, "mpijobs", job)
        keys = core.read_namespaced_secret(f"{job}-ssh", namespace).data
        folder = node.root / manifest["spec"]["sshAuthMountPath"].lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        files = {"id_rsa": "privatekey", "id_rsa.pub": "publickey", "authorized_keys": "publickey"}
        for file, key in files.items():  # root's, and readable by all in the pod, as a Secret is mounted
            (folder / file).write_bytes(base64.b64decode(keys[f"ssh-{key}"]))
        if any(pod["metadata"]["name"].endswith(one) for one in self.impostors):
            (folder / "id_rsa").write_text(_key_pair()[0])
        hostfile = core.read_namespaced_config_map(f"{job}-config", namespace).data["hostfile"]
        if "-launcher-" in pod["metadata"]["name"]:
            (node.root / "etc/mpi").mkdir(exist_ok=True)
            (node.root / "etc/mpi/hostfile").write_text(hostfile)
        self._name_workers(hostfile)
        for mount in pod["spec"]["containers"][0]["volumeMounts"]:
            if mount["name"] == "jobs":  # an emptyDir: root's, and writable by all
                place = node.root / mount["mountPath"].lstrip("/")
                if pod["metadata"]["uid"] not in self.containers:
                    shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True, exist_ok=True)
                place.chmod(0o777)

    def _name_workers(self, hostfile: str) -> None:
        """Play the cluster's name service."""
        names = [line.split()[0] for line in hostfile.splitlines()]
        lines = [f"{self.nodes[number % len(self.nodes)].address} {name}" for number, name in enumerate(names)]
        for node in self.nodes:
            if node.alive():
                path = node.root / "etc/hosts"
                known = path.read_text()
                path.write_text(known + "".join(f"{line}\n" for line in lines if line not in known))

    def _from_secrets(self, pod: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in pod["spec"]["containers"][0].get("envFrom", []):
            secret = self.cluster.core.read_namespaced_secret(source["secretRef"]["name"], pod["metadata"]["namespace"])
            found |= {name: base64.b64decode(value).decode() for name, value in secret.data.items()}
        return found

    def _ended(self, pod: dict[str, Any], container: Container) -> None:
        code = container.process.returncode
        again = pod["spec"]["restartPolicy"] == "OnFailure" and code != 0
        if again and container.node.alive():
            self.containers[pod["metadata"]["uid"]] = self._start(pod)
            self.containers[pod["metadata"]["uid"]].restarts = container.restarts + 1
            return
        ended = {"exitCode": abs(code), "finishedAt": _now(), "message": container.last_words()}
        self._show(pod, "Failed" if code else "Succeeded", ready=False, state={"terminated": ended})

    def _show(self, pod: dict[str, Any], phase: str, *, ready: bool, state: dict[str, Any]) -> None:
        if pod["status"].get("phase") == phase and _is_ready(pod) == ready:
            return
        name = pod["spec"]["containers"][0]["name"]
        container = {"name": name, "ready": ready, "restartCount": 0, "image": "x", "imageID": "x", "state": state}
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": [container]}
        with _absent_is_fine():
            self.cluster.core.patch_namespaced_pod_status(
                pod["metadata"]["name"], pod["metadata"]["namespace"], {"status": status}
            )

    def _end(self, pod: dict[str, Any], container: Container | None) -> None:
        """TERM, the grace, KILL; then the pod is gone."""
        if container is not None and container.process.poll() is None:
            if container.doomed_at is None:
                container.doomed_at = time.monotonic()
                container.signal(signal.SIGTERM)
            if time.monotonic() - container.doomed_at < pod["metadata"].get("deletionGracePeriodSeconds", 0):
                return
            container.signal(signal.SIGKILL)
            container.process.wait(30)
        with _absent_is_fine():
            self.cluster.core.delete_namespaced_pod(
                pod["metadata"]["name"], pod["metadata"]["namespace"], grace_period_seconds=0
            )

    def _pods(self, job: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        wanted = f"training.kubeflow.org/job-name={job['metadata']['name']}" if job else _JOB_LABEL
        found = self.cluster.core.list_namespaced_pod(self.namespace, label_selector=wanted)
        pods: list[dict[str, Any]] = self.cluster.core.api_client.sanitize_for_serialization(found)["items"]
        return pods


@contextmanager
def operating(cluster: Cluster, nodes: Nodes, namespace: str, folder: Path) -> Iterator[Operator]:
    """Yield an operator at work; its containers end with the block."""
    operator = Operator(cluster, nodes, namespace, folder)
    thread = threading.Thread(target=operator.run, name="operator", daemon=True)
    thread.start()
    try:
        yield operator
    finally:
        operator.stop()
        thread.join(60)
        assert not thread.is_alive()
    assert not operator.errors, operator.errors[-1]


def furnish(node: Node) -> None:
    """Give a node what the image has beside Python: the user, sshd's settings and how it is started."""
    root = node.root
    if (root / "opt/node/bin/node-sshd").exists():
        return
    with (root / "etc/passwd").open("a") as passwd, (root / "etc/shadow").open("a") as shadow:
        passwd.write(f"mxdist:x:{UID}:{UID}::/home/mxdist:/bin/bash\n")
        shadow.write("mxdist:*:19000:0:99999:7:::\n")
    for folder in ("home/mxdist", "var/lib/mxdist", "var/lib/mxdist/ssh"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        os.chown(root / folder, UID, UID)
    shutil.copy(REPOSITORY / "docker/sshd_config", root / "etc/ssh/mxdist_sshd_config")
    shutil.copy(REPOSITORY / "docker/node-sshd", root / "opt/node/bin/node-sshd")


def _key_pair() -> tuple[str, str]:
    """Return a private and a public key, of the kind that the operator makes."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f", str(key)]
        subprocess.run(make, check=True)
        return key.read_text(), key.with_suffix(".pub").read_text()


def _owner(job: dict[str, Any]) -> dict[str, Any]:
    names = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "controller": True, "blockOwnerDeletion": True}
    return {**names, "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}


def _is_ready(pod: dict[str, Any]) -> bool:
    found = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in found)


def _probe(pod: dict[str, Any], node: Node) -> bool:
    probe = pod["spec"]["containers"][0].get("readinessProbe")
    if probe is None:
        return True
    try:
        with socket.create_connection((node.address, probe["tcpSocket"]["port"]), timeout=1):
            return True
    except OSError:
        return False


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _absent_is_fine() -> Iterator[None]:
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        if error.status != 404:
            raise
