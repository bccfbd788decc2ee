"""Loads mxdist as a plugin when it lies in Airflow's plugins folder. When it is installed, its entry point does."""

from __future__ import annotations

from importlib.metadata import entry_points

if not any(point.value.startswith("mxdist.plugin:") for point in entry_points(group="airflow.plugins")):
    from mxdist.plugin import MxdistPlugin

    __all__ = ["MxdistPlugin"]
