"""One Airflow for all fault tests, with S3 and MLflow, and an undisturbed training to compare with."""

from __future__ import annotations

import pytest
from faults.building import build_site, train_undisturbed
from faults.site import Site, Trained

from stack.seaweed import Seaweed
from support.airflow_stack import StackFactory


@pytest.fixture(scope="session")
def site(airflow_stack: StackFactory, seaweed: Seaweed, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The Airflow of all fault tests; trainings can be held at barriers."""
    return build_site(airflow_stack, seaweed, tmp_path_factory)


@pytest.fixture(scope="session")
def undisturbed(site: Site) -> Trained:
    """What a training ends with to which nothing happens."""
    return train_undisturbed(site)
