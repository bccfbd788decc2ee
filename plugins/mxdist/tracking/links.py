"""Addresses of pages in MLflow's UI."""

from __future__ import annotations

from urllib.parse import quote


def experiment_url(uri: str, experiment_id: str) -> str:
    """Return the page of an experiment."""
    return f"{uri.rstrip('/')}/#/experiments/{experiment_id}"


def run_url(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the page of a run."""
    return f"{experiment_url(uri, experiment_id)}/runs/{run_id}"


def model_url(uri: str, name: str, version: str | None = None) -> str:
    """Return the page of a registered model, or of one of its versions."""
    page = f"{uri.rstrip('/')}/#/models/{quote(name, safe='')}"
    return page if version is None else f"{page}/versions/{version}"
