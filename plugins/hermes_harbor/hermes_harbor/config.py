"""The settings of the environments `harbor` and `terminal-bench-2`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hermes_core import DatasetConfig


class HarborConfig(DatasetConfig):
    """Settings of the environment `harbor`; on a command line `--env.dataset_name=tasks/`."""

    dataset_name: str
    """A task's folder (it has a `task.toml`), or a folder of such folders. In a git repository, it is
    `https://HOST/REPOSITORY#REF:FOLDER` or `file:///PATH#REF:FOLDER`; REF and FOLDER may be left out."""
    cache_dir: str = "~/.cache/hermes-rl/harbor"
    """Where datasets from git repositories are kept, by commit."""
    submodules: bool = False
    """Whether the submodules of a repository are fetched, too."""
    git_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds for fetching a repository."""
    image: str | None = Field(default=None, min_length=1)
    """The image of tasks that name none, instead of building their Dockerfile."""
    force_build: bool = False
    """Build the Dockerfile of each task, also of those that name an image."""
    workdir: str | None = Field(default=None, pattern="^/")
    """The directory in which the commands of a task start, if its `task.toml` names none. None is the working directory
    of its image."""
    accept: tuple[Literal["image", "network", "gpus", "mcp_urls"], ...] = ()
    """Demands of tasks that this run may ignore. `image`: the profile's image, or the system of a backend without
    images, replaces the task's image. `network`: the profile's network replaces the task's. `gpus`: the profile's GPUs
    count. `mcp_urls`: MCP servers of the run replace those at URLs."""
    reward_key: str = "reward"
    """The name of the reward that counts, if the tests write several. A single one counts under any name."""
    least_reward: float = 0.0
    """The smallest valid reward."""
    most_reward: float = 1.0
    """The largest valid reward."""
    package_cache: str | None = Field(default=None, min_length=1)
    """Where pip, uv and apt of the tests find packages: a folder of wheels on the driver, which is sent to the sandbox,
    or the URL of an index. The agent does not see it."""
    artifacts_dir: Path | None = None
    """A folder for a tar of each rollout's artifacts. They come from a sandbox, so unpack them with care. None keeps
    artifacts only while separate tests need them."""
    max_artifact_bytes: int = Field(default=64 << 20, gt=0)
    """The largest size of all artifacts of a task or a step together."""
    max_artifact_files: int = Field(default=10_000, gt=0)
    """The largest number of files in these artifacts."""
    max_upload_bytes: int = Field(default=256 << 20, gt=0)
    """The largest size of a task's tests, and of its solution."""

    @property
    def cache(self) -> Path:
        """Return `cache_dir` as a path."""
        return Path(self.cache_dir).expanduser()

    @model_validator(mode="after")
    def _in_order(self) -> HarborConfig:
        if self.least_reward >= self.most_reward:
            raise ValueError("least_reward must be below most_reward")
        return self


class TerminalBench2Config(HarborConfig):
    """Settings of the environment `terminal-bench-2`."""

    dataset_name: str = "NousResearch/terminal-bench-2"
    """A `.jsonl` or `.parquet` file, a folder of such files, or the name of a dataset on the Hugging Face hub."""
    dataset_split: str = "train"
    """The split of a hub dataset; in a folder, the files whose names start with it."""
    max_archive_bytes: int = Field(default=512 << 20, gt=0)
    """The largest size of a row's archive when it is unpacked."""
    max_archive_files: int = Field(default=10_000, gt=0)
    """The largest number of files in a row's archive."""
