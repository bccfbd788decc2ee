"""The Airflow plugin: listeners that close what a DAG run leaves open."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from mxdist import listeners


class MxdistPlugin(AirflowPlugin):
    """Registers the listeners, once, whichever way the package came here."""

    name = "mxdist"
    listeners = [listeners]
