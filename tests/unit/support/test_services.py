from __future__ import annotations

from stack.mlflow import Mlflow
from stack.seaweed import Seaweed


def test_an_object_survives_a_crash_of_s3(seaweed: Seaweed, bucket: str) -> None:
    seaweed.client().put_object(Bucket=bucket, Key="a/b", Body=b"kept")
    seaweed.kill()
    assert not seaweed.alive()
    seaweed.start()
    assert seaweed.client().get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"kept"


def test_mlflow_comes_back_on_the_same_port(mlflow_server: Mlflow) -> None:
    url = mlflow_server.url
    mlflow_server.stop()
    assert mlflow_server.status("/health") == 0
    mlflow_server.start()
    assert mlflow_server.url == url
    assert mlflow_server.status("/health") == 200
