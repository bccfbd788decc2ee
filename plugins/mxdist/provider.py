"""What Airflow learns of this package when it is installed: the entry point ``apache_airflow_provider``."""

from __future__ import annotations

from typing import Any

import mxdist

_TEXT = {"type": ["string", "null"]}
_LINES = {"type": ["string", "null"], "format": "multiline"}
_KEY_FIELDS = {
    "private_key": {
        "label": "Private key",
        "description": "The whole file, with its line breaks. Empty: the keys and the agent of the worker's own user.",
        "schema": _LINES,
    },
    "known_hosts": {
        "label": "Known host keys",
        "description": "Lines of a known_hosts file. Empty: those that the worker's own user knows.",
        "schema": _LINES,
    },
}


def get_provider_info() -> dict[str, Any]:
    """Return connection types with their forms, and the links that operators show.

    The plugin (listeners) has an entry point of its own, ``airflow.plugins``: named here as well, it would be loaded
    twice.
    """
    return {
        "package-name": "mxdist",
        "name": "mxdist",
        "description": "Distributed MXNet training: data in S3, runs and models in MLflow.",
        "versions": [mxdist.__version__],
        "connection-types": [_cluster(), _mlflow(), _ssh(), _slurm()],
        "extra-links": ["mxdist.links.mlflow.MlflowRunLink", "mxdist.links.mlflow.MlflowModelLink"],
    }


def _cluster() -> dict[str, Any]:
    return {
        "connection-type": "mxdist",
        "hook-class-name": "mxdist.hooks.cluster.ClusterHook",
        "hook-name": "mxdist cluster",
        "ui-field-behaviour": {
            "hidden-fields": ["host", "schema", "port"],
            "relabeling": {"login": "S3 access key", "password": "S3 secret key"},
            "placeholders": {
                "login": "empty: the connection below, or the environment",
                "runs_uri": "s3://bucket/runs",
                "data_uri": "s3://bucket/data",
                "node_python": "/opt/mxdist/node/bin/python",
                "endpoint_url": "http://127.0.0.1:8333",
            },
        },
        "conn-fields": {
            "runs_uri": {
                "label": "Run store",
                "description": "Where jobs, logs and models are kept: s3://bucket/prefix or a shared folder.",
                "schema": {"type": "string", "minLength": 1},
            },
            "data_uri": {
                "label": "Datasets",
                "description": "Where datasets are staged: s3://bucket/prefix or a shared folder.",
                "schema": _TEXT,
            },
            "node_python": {
                "label": "Node Python",
                "description": "Python of the node environment, with mxnet and horovod.",
                "schema": _TEXT,
            },
            "workdir": {"label": "Scratch folder", "description": "On the nodes, for jobs.", "schema": _TEXT},
            "endpoint_url": {"label": "S3 endpoint", "description": "For servers other than AWS.", "schema": _TEXT},
            "region": {"label": "S3 region", "schema": _TEXT},
            "aws_conn_id": {
                "label": "S3 connection",
                "description": "Take the S3 keys from this connection of type Amazon Web Services instead.",
                "schema": _TEXT,
            },
            "cluster_conn_id": {
                "label": "Cluster connection",
                "description": "Of type SSH hosts, Slurm or Kubernetes: where jobs run. Empty: on the worker's host.",
                "schema": _TEXT,
            },
        },
    }


def _mlflow() -> dict[str, Any]:
    return {
        "connection-type": "mxdist_mlflow",
        "hook-class-name": "mxdist.hooks.mlflow.MlflowHook",
        "hook-name": "MLflow (mxdist)",
        "ui-field-behaviour": {
            "hidden-fields": ["schema"],
            "relabeling": {"host": "Server", "login": "User", "password": "Password, or token without a user"},
            "placeholders": {"host": "http://127.0.0.1:5000"},
        },
        "conn-fields": {
            "ui_url": {
                "label": "Address for people",
                "description": "Where a browser reaches MLflow, if not where Airflow does.",
                "schema": _TEXT,
            },
        },
    }


def _ssh() -> dict[str, Any]:
    return {
        "connection-type": "mxdist_ssh",
        "hook-class-name": "mxdist.hooks.ssh.SshHook",
        "hook-name": "SSH hosts (mxdist)",
        "ui-field-behaviour": {
            "hidden-fields": ["host", "schema"],
            "relabeling": {"login": "User", "password": "Passphrase of the key"},
            "placeholders": {"hosts": "node[1-3] slots=2", "port": "22"},
        },
        "conn-fields": {
            "hosts": {
                "label": "Hosts",
                "description": "One a line: node1:2, node[2-4] slots=2, user@host port=2222. Tasks may name others.",
                "schema": _LINES,
            },
            **_KEY_FIELDS,
        },
    }


def _slurm() -> dict[str, Any]:
    return {
        "connection-type": "mxdist_slurm",
        "hook-class-name": "mxdist.hooks.ssh.SlurmHook",
        "hook-name": "Slurm (mxdist)",
        "ui-field-behaviour": {
            "hidden-fields": ["schema"],
            "relabeling": {"host": "Head node", "login": "User", "password": "Passphrase of the key"},
            "placeholders": {"host": "empty: sbatch is on the worker's host", "port": "22"},
        },
        "conn-fields": {**_KEY_FIELDS},
    }
