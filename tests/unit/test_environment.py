"""What of a submitter's environment goes along with a job."""

from __future__ import annotations

import pytest

from mxdist.environment import base_environment, travelling


@pytest.mark.parametrize(
    ("name", "value", "goes"),
    [
        ("HTTPS_PROXY", "http://proxy:3128", True),
        ("HTTPS_PROXY", "http://me@proxy:3128", True),
        ("NO_PROXY", "localhost,10.0.0.0/8,[::1]:80", True),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:8333/a:b/@c", True),
        ("HTTPS_PROXY", "http://me:secret@proxy:3128", False),
        ("http_proxy", "me:secret@proxy:3128", False),
        ("AWS_ENDPOINT_URL_S3", "https://:secret@s3.example.com", False),
        ("PATH", "/usr/bin", False),
        ("AWS_SECRET_ACCESS_KEY", "secret", False),
    ],
)
def test_what_travels_to_other_hosts(name: str, value: str, goes: bool) -> None:
    assert travelling({name: value}) == ({name: value} if goes else {})


def test_a_job_on_this_host_keeps_its_proxy() -> None:
    own = {"HTTPS_PROXY": "http://me:secret@proxy:3128"}
    assert base_environment(own) == own
