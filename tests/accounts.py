"""The accounts that run tests: root and an ordinary user, or the latter alone."""

from __future__ import annotations

import os

import pytest

AGAIN = pytest.mark.full if os.geteuid() == 0 else ()
"""A mark for tests that an ordinary user repeats after root."""
