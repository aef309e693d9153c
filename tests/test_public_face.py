"""What `from hermes_core import …` promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hermes_core


@pytest.mark.parametrize("name", hermes_core.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(hermes_core, name) is not None
    assert name in dir(hermes_core)


def test_a_name_that_is_none_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runtimes'"):
        hermes_core.Runtimes  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_is_loaded_before_it_is_used() -> None:
    program = "import sys, hermes_core; print(sorted(name for name in sys.modules if name.startswith('hermes_core.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['hermes_core.version']"
