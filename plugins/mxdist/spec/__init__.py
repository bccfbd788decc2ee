"""What a user asks for, as frozen values that know how to check themselves."""

from mxdist.spec.base import Spec, digest_of
from mxdist.spec.cluster import Checkpoints, Cluster, ClusterKind, Code, Limits, Storage, Tracking, misnamed
from mxdist.spec.dataset import Dataset, Split
from mxdist.spec.failures import FailurePolicy, Then
from mxdist.spec.hosts import Host, parse_inventory
from mxdist.spec.job import BaseJob, DType, EvaluationJob, Job, TrainingJob, job_schema, parse_job
from mxdist.spec.model import Head, Init, Model, Script
from mxdist.spec.networks import NETWORKS
from mxdist.spec.optimizer import Decay, Optimizer, OptimizerName, Schedule
from mxdist.spec.parallelism import (
    Across,
    Balance,
    BatchNorm,
    Compression,
    Controller,
    Inside,
    KVStore,
    Lossy,
    Parallelism,
    PipelineSchedule,
    Strategy,
)
from mxdist.spec.platforms import Kubernetes, Slurm, Ssh
from mxdist.spec.scaling import Scaling, ScalingPolicy
from mxdist.spec.state import JobState

__all__ = [
    "Across",
    "Balance",
    "BaseJob",
    "BatchNorm",
    "Checkpoints",
    "Cluster",
    "ClusterKind",
    "Code",
    "Compression",
    "Controller",
    "DType",
    "Dataset",
    "Decay",
    "EvaluationJob",
    "FailurePolicy",
    "Head",
    "Host",
    "Init",
    "Inside",
    "Job",
    "JobState",
    "KVStore",
    "Kubernetes",
    "Limits",
    "Lossy",
    "Model",
    "NETWORKS",
    "Optimizer",
    "OptimizerName",
    "Parallelism",
    "PipelineSchedule",
    "Scaling",
    "ScalingPolicy",
    "Schedule",
    "Script",
    "Slurm",
    "Spec",
    "Split",
    "Ssh",
    "Storage",
    "Strategy",
    "Tracking",
    "Then",
    "TrainingJob",
    "digest_of",
    "job_schema",
    "misnamed",
    "parse_inventory",
    "parse_job",
]
