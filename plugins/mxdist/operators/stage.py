"""Put a dataset into the store as one immutable version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from mxdist.hooks.cluster import ClusterHook
from mxdist.operators.conf import check_conf
from mxdist.operators.early import DATASET
from mxdist.operators.failures import as_airflow
from mxdist.operators.files import beside_dag
from mxdist.operators.values import yes
from mxdist.spec import Split, Storage

if TYPE_CHECKING:
    from airflow.sdk import Context


class StageDatasetOperator(BaseOperator):
    """Stage a dataset: only what is new is sent, and nothing is visible before it is complete.

    Returns ``manifest_uri``, ``version`` and ``as_of``, what was counted and what was sent.

    :param source: a folder, ``mnist5k``, ``cifar10:`` with a folder or S3 URI, ``package.module:function``, or
        ``file.py:function`` beside the DAG file; a function is given an empty folder and fills it.
    :param dataset_name: the dataset's name in the store.
    :param split: divide into train, validation and test: fields of ``Split``.
    :param as_of: how far the data reach, as ISO text; decides which of two versions is older. Default: the end of the
        run's data interval or its logical date, whichever is later; in a run without either, when it was due.
    :param verify: read what is stored already, too, and send anew what is damaged.
    :param mxdist_conn_id: the connection that says where datasets are kept.
    :param check_conf: refuse a run whose configuration names a parameter that the DAG does not have; the first task
        of a run also refuses what no task of the DAG could take.
    """

    template_fields: Sequence[str] = ("source", "dataset_name", "split", "as_of", "verify", "mxdist_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"split": "json"}
    ui_color = "#e8fbf0"

    def __init__(
        self,
        *,
        source: str,
        dataset_name: str,
        split: Mapping[str, Any] | None = None,
        as_of: str | None = None,
        verify: bool | str = False,
        mxdist_conn_id: str = ClusterHook.default_conn_name,
        check_conf: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source = source
        self.dataset_name = dataset_name
        self.split = split
        self.as_of = as_of
        self.verify = verify
        self.mxdist_conn_id = mxdist_conn_id
        self.check_conf = check_conf

    def check_early(self, context: Context) -> None:
        """Check the split.

        :raises SpecError: with every wrong field.
        """
        if self.split is not None:
            Split.parse(self.split)

    def hands_over_early(self) -> dict[str, Any]:
        """Return something of the form that the task will return."""
        return dict(DATASET)

    def execute(self, context: Context) -> dict[str, Any]:
        """Stage, and return what names the version."""
        from mxdist.data.stage import stage

        with as_airflow():
            if self.check_conf:
                check_conf(context)
            hook = ClusterHook(self.mxdist_conn_id)
            staged = stage(
                self._source(),
                hook.data_uri(),
                self.dataset_name,
                split=None if self.split is None else Split.parse(self.split),
                as_of=self.as_of or data_as_of(context),
                verify=yes("verify", self.verify),
                storage=Storage(endpoint_url=hook.settings.endpoint_url, region=hook.settings.region),
                credentials=hook.credentials,
            )
        self.log.info("Version %s: sent %d files.", staged["version"][:12], staged["uploaded_files"])
        return dict(staged)

    def _source(self) -> str:
        path, colon, function = self.source.rpartition(":")
        if colon and path.endswith(".py"):
            return f"{beside_dag(self, path)}:{function}"
        beside = beside_dag(self, self.source)
        return beside if Path(beside).is_dir() else self.source


def data_as_of(context: Context) -> datetime | None:
    """Return the moment that a run's data ends: None means now.

    The form of the UI gives a run a logical date, and Airflow gives it the last whole interval before: but what is
    staged now is of now. A scheduled run's logical date is before the end of its interval. A run started by an asset or
    by the API may have neither; then the time it was queued to run after counts, so that a retry says the same.
    """
    run = context["dag_run"]
    return max(filter(None, (run.data_interval_end, run.logical_date)), default=run.run_after)
