"""A real Kubernetes API server with its etcd, on loopback. No kubelet, no controller: no pod runs by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import kube_apiserver
from stack.ports import free_ports
from stack.processes import ServiceError, wait_until
from stack.service import Service, start_all, stop_all
from support.guarding import guarded
from support.places import REPOSITORY

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CRD = Path(__file__).with_name("mpijob_crd.yaml")
ADMIN, MXDIST, STRANGER = "admin", "mxdist", "stranger"
"""Who may do everything, who has the rights that docs/kubernetes.md grants, and who has none."""

_CRD_NAME = "mpijobs.kubeflow.org"
_ETCD = "/usr/bin/etcd"


class Etcd(Service):
    """The database of an API server."""

    name = "etcd"

    def __init__(self, folder: Path) -> None:
        self.port, self._peers = free_ports(2)
        super().__init__(folder, {"PATH": "/usr/bin:/bin", "HOME": str(folder)})

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        peers = f"http://127.0.0.1:{self._peers}"
        where = [f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}"]
        where += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        where += [f"--initial-cluster=default={peers}"]
        return [_ETCD, f"--data-dir={self.folder / 'etcd'}", *where, "--unsafe-no-fsync", "--log-level=warn"]

    def prepare(self) -> None:
        super().prepare()
        if not Path(_ETCD).exists():
            raise ServiceError("there is no etcd on this machine (Debian: apt-get install etcd-server).")

    def ready(self) -> bool:
        return _get(f"{self.url}/health") is not None


class ApiServer(Service):
    """An API server, with a token for each of three users, RBAC, and quotas counted at admission."""

    name = "kube-apiserver"

    def __init__(self, folder: Path, etcd: Etcd) -> None:
        self._etcd = etcd
        (self.port,) = free_ports(1)
        self.tokens = {user: uuid.uuid4().hex for user in (ADMIN, MXDIST, STRANGER)}
        super().__init__(folder, {"PATH": "/usr/bin:/bin", "HOME": str(folder)})

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def authority(self) -> Path:
        """The certificate that it is verified by."""
        return self.folder / "certs/apiserver.crt"

    def command(self) -> Sequence[str]:
        key = self.folder / "account.key"
        return [
            str(kube_apiserver.cached()), f"--etcd-servers={self._etcd.url}", f"--cert-dir={self.folder / 'certs'}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={self.port}",
            "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://127.0.0.1",
            f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}", "--authorization-mode=RBAC",
            # Pods would wait for a service account that no controller makes here.
            "--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none",
        ]  # fmt: skip

    def prepare(self) -> None:
        super().prepare()
        if not kube_apiserver.cached().exists():
            raise ServiceError(f"no kube-apiserver is built: {sys.executable} scripts/kube_apiserver.py")
        if not (self.folder / "account.key").exists():
            make = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-m", "PEM", "-N", ""]
            subprocess.run([*make, "-f", str(self.folder / "account.key")], check=True)
        groups = {ADMIN: "system:masters"}
        lines = [f"{token},{user},{user},{groups.get(user, '')}" for user, token in self.tokens.items()]
        path = self.folder / "tokens.csv"
        path.touch(mode=0o600)
        path.write_text("\n".join(line.rstrip(",") for line in lines) + "\n")

    def ready(self) -> bool:
        if not self.authority.exists():
            return False
        return _get(f"{self.url}/readyz", self.authority, self.tokens[ADMIN]) == b"ok"


class Cluster:
    """An API server that knows MPIJobs, and helpers to look into it with all rights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etcd = Etcd(folder)
        self.server = ApiServer(folder, self.etcd)

    def start(self) -> None:
        """Start both services, and make MPIJobs known."""
        start_all([self.etcd, self.server])
        self.install()

    def stop(self) -> None:
        """End both."""
        stop_all([self.server, self.etcd])

    def client(self, user: str = ADMIN) -> ApiClient:
        """Return a client with the rights of one user."""
        from kubernetes.config import new_client_from_config

        return new_client_from_config(config_file=str(self.kubeconfig(user)))

    def kubeconfig(self, user: str = ADMIN, *, url: str | None = None) -> Path:
        """Write a kubeconfig for one user and return it."""
        cluster = {"server": url or self.server.url, "certificate-authority": str(self.server.authority)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.server.tokens[user]}}],
            "contexts": [{"name": user, "context": {"cluster": "test", "user": user}}],
            "current-context": user,
        }
        path = self.folder / f"{user}-{uuid.uuid4().hex[:8]}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document))
        return path

    @cached_property
    def core(self) -> Any:
        """The core API, with all rights."""
        from kubernetes.client import CoreV1Api

        return CoreV1Api(self.client())

    @cached_property
    def custom(self) -> Any:
        """The API of custom objects, with all rights."""
        from kubernetes.client import CustomObjectsApi

        return CustomObjectsApi(self.client())

    def install(self) -> None:
        """Make MPIJobs known, as the operator's installation does."""
        self._extensions.create_custom_resource_definition(yaml.safe_load(CRD.read_text()))
        if not wait_until(self._serves, 60):
            raise ServiceError("MPIJobs did not become known")

    def uninstall(self) -> None:
        """Forget MPIJobs, with all that there are."""
        for job in self.custom.list_cluster_custom_object("kubeflow.org", "v2beta1", "mpijobs")["items"]:
            self.release(job)  # one that nobody lets go of would hold it up
        self._extensions.delete_custom_resource_definition(_CRD_NAME)
        if not wait_until(self._forgotten, 120):
            raise ServiceError("MPIJobs are still known")

    def release(self, job: dict[str, Any]) -> None:
        """Let go of an MPIJob that is deleted in the foreground, as the garbage collector does in the end."""
        where = ("kubeflow.org", "v2beta1", job["metadata"]["namespace"], "mpijobs", job["metadata"]["name"])
        self.custom.patch_namespaced_custom_object(*where, {"metadata": {"finalizers": None}})

    def namespace(self, name: str = "") -> str:
        """Make a namespace and return its name."""
        name = name or f"test-{uuid.uuid4().hex[:12]}"
        self.core.create_namespace({"metadata": {"name": name}})
        return name

    def grant(self, namespace: str, rules: Sequence[Any], user: str = MXDIST) -> None:
        """Give a user rights in a namespace."""
        from kubernetes.client import RbacAuthorizationV1Api

        rbac = RbacAuthorizationV1Api(self.client())
        rbac.create_namespaced_role(namespace, {"metadata": {"name": "mxdist"}, "rules": list(rules)})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "mxdist"}
        subjects = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]
        binding = {"metadata": {"name": "mxdist"}, "roleRef": role, "subjects": subjects}
        rbac.create_namespaced_role_binding(namespace, binding)

    def jobs(self, namespace: str) -> list[dict[str, Any]]:
        """Return the MPIJobs of a namespace."""
        found = self.custom.list_namespaced_custom_object("kubeflow.org", "v2beta1", namespace, "mpijobs")
        items: list[dict[str, Any]] = found["items"]
        return items

    def set_status(self, job: dict[str, Any], status: dict[str, Any]) -> None:
        """Write the status of an MPIJob, as the operator does."""
        where = ("kubeflow.org", "v2beta1", job["metadata"]["namespace"], "mpijobs", job["metadata"]["name"])
        self.custom.patch_namespaced_custom_object_status(*where, {"status": status})

    @cached_property
    def _extensions(self) -> Any:
        from kubernetes.client import ApiextensionsV1Api

        return ApiextensionsV1Api(self.client())

    def _forgotten(self) -> bool:
        known = self._extensions.list_custom_resource_definition().items
        return not any(one.metadata.name == _CRD_NAME for one in known) and not self._serves()

    def _serves(self) -> bool:
        found = _get(f"{self.server.url}/apis/kubeflow.org/v2beta1", self.server.authority, self.server.tokens[ADMIN])
        return found is not None and any(one["name"] == "mpijobs" for one in json.loads(found)["resources"])


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster; it ends with the block, or with this process."""
    with guarded(folder):
        cluster = Cluster(folder)
        cluster.start()
        yield cluster
        cluster.stop()


def documented_rules() -> list[dict[str, Any]]:
    """Return the rules of the Role that docs/kubernetes.md tells to grant."""
    text = (REPOSITORY / "docs/kubernetes.md").read_text()
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        for document in yaml.safe_load_all(block):
            if document and document.get("kind") == "Role":
                rules: list[dict[str, Any]] = document["rules"]
                return rules
    raise ServiceError("docs/kubernetes.md holds no Role")


def _get(url: str, authority: Path | None = None, token: str = "") -> bytes | None:
    """Return the body of a good answer, or None."""
    import ssl
    import urllib.error
    import urllib.request

    context = ssl.create_default_context(cafile=str(authority)) if authority else None
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    try:
        with opener.open(request, timeout=5) as answer:
            body: bytes = answer.read()
            return body
    except (urllib.error.URLError, OSError):
        return None
