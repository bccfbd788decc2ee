"""What an MPIJob (kubeflow.org/v2beta1) may hold: the fields that mxdist writes, and no others.

The API server takes an MPIJob with a policy that does not exist and drops fields that it does not know, without a word;
the operator then refuses the job in an event that nobody reads, or runs another job than was meant. So every manifest
is checked here before it is sent: unknown fields, words, types, names and their lengths.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from mxdist.errors import Problem, SpecError

MOST_LETTERS = 63
"""Of a DNS label: pods are found by names that are such labels."""

_DNS_LABEL = re.compile(r"^[a-z]([a-z0-9-]*[a-z0-9])?$")
_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
_Short = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=MOST_LETTERS)]
_LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
_LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
_Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")]
_EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_Seconds = Annotated[int, Field(ge=0)]
_Labels = dict[_LabelKey, _LabelValue]
_Resources = dict[_LabelKey, _Quantity]


class _Part(BaseModel):
    """A part of a manifest: nothing is cast, nothing unknown is taken."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ObjectMeta(_Part):
    """Names, labels and notes of an object."""

    name: _Short
    namespace: _Short
    labels: _Labels = {}
    annotations: dict[_LabelKey, str] = {}


class PodMeta(_Part):
    """Labels and notes of the pods of one role; the operator names them."""

    labels: _Labels = {}
    annotations: dict[_LabelKey, str] = {}


class NameReference(_Part):
    """An object in the same namespace, by its name."""

    name: _Name


class EnvVar(_Part):
    """A variable that is not secret."""

    name: _EnvName
    value: str


class EnvFrom(_Part):
    """Variables from a Secret, by its name: the manifest holds no secret."""

    secretRef: NameReference


class ResourceRequirements(_Part):
    """What a container gets, and what it must not exceed."""

    limits: _Resources = {}
    requests: _Resources = {}


class Port(_Part):
    """A port that a container listens on."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,15}$")]
    containerPort: Annotated[int, Field(ge=1, le=65535)]
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


class TcpSocket(_Part):
    """Where a probe connects to."""

    port: Annotated[int, Field(ge=1, le=65535)]


class Probe(_Part):
    """How the kubelet finds out whether a container is ready."""

    tcpSocket: TcpSocket
    periodSeconds: Annotated[int, Field(ge=1)] = 10
    failureThreshold: Annotated[int, Field(ge=1)] = 3


class Capabilities(_Part):
    """Rights that a container has beside its user's."""

    add: list[str] = []
    drop: list[str] = []


class SecurityContext(_Part):
    """Rights of one container."""

    allowPrivilegeEscalation: bool
    capabilities: Capabilities


class SeccompProfile(_Part):
    """Which system calls may be used."""

    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]


class PodSecurityContext(_Part):
    """Rights of all containers of a pod."""

    runAsNonRoot: bool
    seccompProfile: SeccompProfile


class VolumeMount(_Part):
    """Where a volume appears."""

    name: _Short
    mountPath: Annotated[str, Field(pattern=r"^/")]
    readOnly: bool = False


class EmptyDir(_Part):
    """A volume that lives as long as its pod."""

    medium: Literal["", "Memory"] = ""
    sizeLimit: _Quantity | None = None


class Volume(_Part):
    """A volume of a pod."""

    name: _Short
    emptyDir: EmptyDir


class Container(_Part):
    """The one container of a pod."""

    name: _Short
    image: Annotated[str, Field(min_length=1)]
    command: Annotated[list[str], Field(min_length=1)]
    args: list[str] = []
    env: list[EnvVar] = []
    envFrom: list[EnvFrom] = []
    ports: list[Port] = []
    readinessProbe: Probe | None = None
    resources: ResourceRequirements = ResourceRequirements()
    securityContext: SecurityContext
    terminationMessagePolicy: Literal["File", "FallbackToLogsOnError"] = "File"
    volumeMounts: list[VolumeMount] = []


class PodSpec(_Part):
    """A pod of one role."""

    containers: Annotated[list[Container], Field(min_length=1, max_length=1)]
    automountServiceAccountToken: bool
    enableServiceLinks: bool
    imagePullSecrets: list[NameReference] = []
    nodeSelector: _Labels = {}
    priorityClassName: _Name | None = None
    securityContext: PodSecurityContext
    serviceAccountName: _Name | None = None
    terminationGracePeriodSeconds: _Seconds
    volumes: list[Volume] = []

    @field_validator("volumes")
    @classmethod
    def _all_mounted(cls, volumes: list[Volume], info: ValidationInfo) -> list[Volume]:
        mounted = {mount.name for one in info.data.get("containers", []) for mount in one.volumeMounts}
        wrong = mounted ^ {volume.name for volume in volumes}
        if wrong:
            raise ValueError(f"volumes and volumeMounts differ in {', '.join(sorted(wrong))}")
        return volumes


class PodTemplate(_Part):
    """The pods of one role."""

    metadata: PodMeta
    spec: PodSpec


class Replicas(_Part):
    """How many pods of one role there are."""

    replicas: Annotated[int, Field(ge=1)]
    restartPolicy: Literal["Never", "OnFailure"]
    template: PodTemplate


class Launcher(Replicas):
    """The pod of the supervisor."""

    replicas: Literal[1]


class ReplicaSpecs(_Part):
    """The two roles; a key that the operator does not know would be a role that never starts."""

    Launcher: Launcher
    Worker: Replicas


class SchedulingPolicy(_Part):
    """What a gang scheduler is told."""

    minAvailable: Annotated[int, Field(ge=1)]
    minResources: _Resources | None = None
    priorityClass: _Name | None = None
    queue: _Name | None = None
    scheduleTimeoutSeconds: Annotated[int, Field(ge=1)] | None = None


class RunPolicy(_Part):
    """Start and end of the whole job."""

    activeDeadlineSeconds: Annotated[int, Field(ge=1)] | None = None
    backoffLimit: Annotated[int, Field(ge=0)]
    cleanPodPolicy: Literal["None", "Running", "All"]
    schedulingPolicy: SchedulingPolicy | None = None
    suspend: bool = False
    ttlSecondsAfterFinished: _Seconds | None = None


class MpiJobSpec(_Part):
    """What the operator is asked for."""

    launcherCreationPolicy: Literal["AtStartup", "WaitForWorkersReady"]
    mpiImplementation: Literal["OpenMPI", "Intel", "MPICH"]
    mpiReplicaSpecs: ReplicaSpecs
    runLauncherAsWorker: bool = False
    runPolicy: RunPolicy
    slotsPerWorker: Annotated[int, Field(ge=1)]
    sshAuthMountPath: Annotated[str, Field(pattern=r"^/.")]


class MpiJob(_Part):
    """The whole manifest."""

    apiVersion: Literal["kubeflow.org/v2beta1"]
    kind: Literal["MPIJob"]
    metadata: ObjectMeta
    spec: MpiJobSpec

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        last = last_worker(self.metadata.name, self.spec.mpiReplicaSpecs.Worker.replicas)
        if not _DNS_LABEL.match(last) or len(last) > MOST_LETTERS:
            letters = f"{last!r} has {len(last)} letters"
            raise ValueError(f"no pod can be called so: {letters}, and must be a DNS label of {MOST_LETTERS} at most")
        return self


def last_worker(name: str, workers: int) -> str:
    """Return what the pod with the longest name is called: the last worker, or the launcher beside few workers."""
    return max(f"{name}-launcher", f"{name}-worker-{workers - 1}", key=len)


def check(manifest: Any) -> None:
    """Make sure that a manifest is what mxdist means to send.

    :raises SpecError: with every unknown field, wrong word, type and name, each by its path.
    """
    try:
        MpiJob.model_validate(manifest)
    except ValidationError as error:
        problems = [
            Problem(".".join(map(str, one["loc"])), _message(one["type"], one["msg"])) for one in error.errors()
        ]
        raise SpecError("The MPIJob", problems) from None


def _message(kind: str, message: str) -> str:
    known = {"extra_forbidden": "no such field", "missing": "is required"}
    text = known.get(kind, message.removeprefix("Value error, "))
    return f"{text[0].lower()}{text[1:]}"
