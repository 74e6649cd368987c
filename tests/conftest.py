"""What all tests share."""

from __future__ import annotations

import logging
import os

import structlog

# Read when torch is loaded: threads that spin while they wait bring a shared machine to a standstill.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A request's one log line is tested where it matters; thousands of them are noise.
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
