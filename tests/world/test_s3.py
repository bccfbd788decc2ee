"""Jobs whose run store is a real S3 server, which goes away and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from world.conftest import Jobs, log_of, wait_until
from world.hosts import across, disk, on_hosts
from world.toy import job_on, staged

from mxdist.launch import SECRET_NAMES, JobClient
from mxdist.spec import JobState, Storage, TrainingJob
from mxdist.store import Credentials, open_store
from stack.seaweed import Seaweed

PATIENT = """
    import os, sys, time
    print("begun", flush=True)
    open(sys.argv[1] + "/begun", "a").write("begun\\n")
    while not os.path.exists(sys.argv[1] + "/go"):
        time.sleep(0.05)
    print("done")
    open(sys.argv[1] + "/done", "a").write("done\\n")
"""


@pytest.fixture
def s3_jobs(jobs: Jobs, seaweed: Seaweed, bucket: str) -> Iterator[Jobs]:
    """Jobs of one test in a fresh bucket."""
    credentials = Credentials(seaweed.access_key, seaweed.secret_key)
    runs = open_store(f"s3://{bucket}/runs", endpoint_url=seaweed.endpoint_url, credentials=credentials)
    yield Jobs(jobs.folder, JobClient(runs, jobs.launcher), attempts=jobs.attempts)
    if not seaweed.alive():
        seaweed.start()


def on(seaweed: Seaweed, job: TrainingJob) -> TrainingJob:
    return job.model_copy(update={"storage": Storage(endpoint_url=seaweed.endpoint_url)})


def secrets(seaweed: Seaweed) -> dict[str, str]:
    found = {"AWS_ACCESS_KEY_ID": seaweed.access_key, "AWS_SECRET_ACCESS_KEY": seaweed.secret_key}
    assert set(found) <= set(SECRET_NAMES)
    return found


def test_server_away_for_the_whole_end_of_a_training(s3_jobs: Jobs, seaweed: Seaweed) -> None:
    job = on(seaweed, s3_jobs.job(PATIENT))
    attempt = s3_jobs.submit(job, secrets=secrets(seaweed)).attempt
    wait_until(lambda: s3_jobs.marks("begun") and "[0] begun" in log_of(attempt), "the first line in S3")
    seaweed.kill()
    (s3_jobs.folder / "go").touch()
    wait_until(lambda: s3_jobs.marks("done"), "the end of training")
    wait_until((s3_jobs.attempt_dir(attempt) / "outcome.json").exists, "the supervisor's notice of it")
    seaweed.start()
    result = s3_jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED
    assert [line for line in log_of(attempt) if line.startswith("[0]")] == ["[0] begun", "[0] done"]


def test_one_flipped_byte_ends_the_job_before_its_first_step(
    s3_jobs: Jobs, seaweed: Seaweed, bucket: str, tmp_path: Path
) -> None:
    storage = Storage(endpoint_url=seaweed.endpoint_url)
    credentials = Credentials(seaweed.access_key, seaweed.secret_key)
    dataset = staged(tmp_path, f"s3://{bucket}/data", storage=storage, credentials=credentials)
    client = seaweed.client()
    objects = client.list_objects_v2(Bucket=bucket, Prefix="data/")["Contents"]
    largest = max(objects, key=lambda one: one["Size"])["Key"]
    content = bytearray(client.get_object(Bucket=bucket, Key=largest)["Body"].read())
    content[-1] ^= 1
    client.put_object(Bucket=bucket, Key=largest, Body=bytes(content))
    attempt = s3_jobs.submit(job_on(dataset, storage=storage.to_document()), secrets=secrets(seaweed)).attempt
    result = s3_jobs.result(attempt)

    assert (result.state, result.steps, result.restarts) == (JobState.FAILED, 0, 0)
    assert result.cause is not None
    assert (result.cause.kind, "train/x.npy" in result.cause.message) == ("data", True), result.cause
    assert not any(word in str(result.dump()) + "".join(log_of(attempt)) for word in secrets(seaweed).values())


def test_code_reaches_another_host_through_s3(s3_jobs: Jobs, seaweed: Seaweed) -> None:
    on_hosts(s3_jobs)
    job = across(on(seaweed, s3_jobs.job("import mxdist\nprint('from', mxdist.__file__)", ranks=2)))
    attempt = s3_jobs.submit(job, secrets=secrets(seaweed)).attempt
    result = s3_jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    assert any(line.startswith(f"[1] from {disk(s3_jobs)}/") for line in log_of(attempt))


def test_cancel_and_second_submission(s3_jobs: Jobs, seaweed: Seaweed) -> None:
    job = on(seaweed, s3_jobs.job(PATIENT))
    first = s3_jobs.submit(job, secrets=secrets(seaweed))
    again = s3_jobs.submit(job, secrets=secrets(seaweed))
    assert (first.how, again.how) == ("started", "reattached")
    assert s3_jobs.client.cancel(first.attempt, by="user", reason="test").state is JobState.CANCELLED
