"""The settings of a run of `make-tasks`, from which the command's options are made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Wanted(BaseModel):
    """The settings of a run. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    repo: str
    """Path, git bundle or URL of the repository."""
    ref: str = "HEAD"
    """Branch, tag or commit."""
    name: str | None = None
    """Name of the repository in the dataset. None is that of REPO."""
    python: str = ""
    """Python version of the tests, as 3.11. Empty is python3 of the sandbox."""
    requirements: tuple[str, ...] | None = None
    """File with the requirements of the tests. None is what the packaging files say."""
    install: tuple[str, ...] = ()
    """Command that installs what the tests need, in a checkout."""
    pythonpath: str | None = None
    """Directories that the project is imported from. None is what the packaging files say, src, or the top."""
    tests: tuple[str, ...] = ()
    """Where the tests are. Empty is what the project's configuration says."""
    test_command: str = "python -m pytest"
    """Command that runs the tests: `[NAME=value …] python -m pytest …`."""
    count: int = Field(default=50, ge=1)
    """How many tasks to make."""
    kinds: tuple[str, ...] = ()
    """Kinds of bugs."""
    max_broken: int = Field(default=40, ge=1)
    """The most tests that a bug may break."""
    runs: int = Field(default=5, ge=1)
    """How often a test must pass without the bug."""
    per_function: int = Field(default=1, ge=1)
    """The most tasks of one function."""
    candidates: int = Field(default=40, ge=1)
    """The most bugs that are tried in one function."""
    test_timeout_s: float = Field(default=600.0, ge=1)
    """Time limit in seconds for one run of all tests."""
    install_timeout_s: float = 1200.0
    """Time limit in seconds for each step of an installation."""
    seed: int = 0
    """Random seed."""
    statement: Literal["template", "model"] = "template"
    """Who writes the problem statements."""
    model: str | None = None
    """The model that writes them."""

    def configuration(self) -> dict[str, Any]:
        """Return the settings that change the tasks, and so must stay the same when a run goes on."""
        return self.model_dump(mode="json", exclude={"count", "install_timeout_s"})
