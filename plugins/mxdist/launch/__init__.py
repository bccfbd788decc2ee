"""From a job to processes: the pure plan, the code bundle, one launcher a platform, and the client that uses them."""

from mxdist.launch.base import Launcher, Life
from mxdist.launch.bundle import Bundle, collect, collect_later
from mxdist.launch.client import JobClient, Submission, job_key_for_airflow, job_key_for_cli
from mxdist.launch.local import LocalLauncher
from mxdist.launch.plan import SECRET_NAMES, Plan, RankPlan, build_plan

__all__ = [
    "SECRET_NAMES",
    "Bundle",
    "JobClient",
    "Launcher",
    "Life",
    "LocalLauncher",
    "Plan",
    "RankPlan",
    "Submission",
    "build_plan",
    "collect",
    "collect_later",
    "job_key_for_airflow",
    "job_key_for_cli",
]
