"""A log line that cannot be written ends nothing."""

import io
import json
import sys

import pytest
import structlog

from headrace.server import logs


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.fixture
def configured(monkeypatch):
    """Sets standard error and the log up, and puts the log back afterwards."""
    before = structlog.get_config()

    def configure(stderr: io.StringIO) -> io.StringIO:
        monkeypatch.setattr(sys, "stderr", stderr)
        logs.configure("json", "info")
        return stderr

    yield configure
    structlog.configure(**before)


def test_a_standard_error_that_nobody_reads_ends_no_request(configured):
    configured(Broken())
    structlog.get_logger().info("request", id="r1")


def test_half_a_surrogate_pair_is_escaped(configured):
    stderr = configured(io.StringIO())
    structlog.get_logger().info("request", error="boom \ud800")
    assert json.loads(stderr.getvalue())["error"] == "boom \ud800"
