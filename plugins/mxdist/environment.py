"""Which variables travel with a job: allow-lists, for the environment of a worker or a login shell holds secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping

SECRET_NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
"""The secrets that may travel to a job; no others do."""

SUPERVISOR_SECRETS = ("MXDIST_SSH_KEY", "MXDIST_SSH_PASSPHRASE", "MXDIST_SSH_KNOWN_HOSTS")
"""Secrets that reach a supervisor and go no further: no rank has them, and no other host."""

_HERE = {"HOME", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "LANG", "LANGUAGE", "LD_LIBRARY_PATH"}
_HERE |= {"XDG_CACHE_HOME", "XDG_STATE_HOME", "SSL_CERT_DIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"}
_KEEP = _HERE | {"AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION"}
_KEEP |= {"MXDIST_BARRIERS"}  # where tests hold processes: see barriers.py
_KEEP |= {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
_KEEP_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "MXNET_", "HOROVOD_", "OMPI_MCA_", "MLFLOW_HTTP_REQUEST_")
_HERE_PREFIXES = ("LC_", "CUDA_", "NVIDIA_")
_PASSWORD = re.compile(r"[^/@:]*:[^/@]+@")  # as in user:password@proxy:3128


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a job inherits from whoever starts it."""
    return {k: v for k, v in environment.items() if k in _KEEP or k.startswith(_KEEP_PREFIXES)}


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of it goes along to other hosts: paths, people and devices are each host's own.

    It stands readable in batch scripts and manifests, so an address with a password in it stays here.
    """
    kept = base_environment(environment).items()
    return {k: v for k, v in kept if k not in _HERE and not k.startswith(_HERE_PREFIXES) and not _PASSWORD.search(v)}
