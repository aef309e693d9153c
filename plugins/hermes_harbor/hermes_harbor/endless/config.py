"""The settings of the environment `endless-terminals`."""

from __future__ import annotations

from pydantic import Field

from hermes_core import DatasetConfig


class EndlessConfig(DatasetConfig):
    """Settings of the environment `endless-terminals`; on a command line `--env.dataset_name=tasks/`."""

    dataset_name: str
    """A task's folder (it has a `container.def`), a folder of such folders, or rows that name such folders: a `.jsonl`
    or `.parquet` file, or the name of a dataset on the Hugging Face hub."""
    dataset_split: str = "train"
    """The split of a hub dataset; in a folder of rows, the files whose names start with it."""
    tasks_dir: str | None = None
    """The folder that holds the folders of rows. None is the current directory."""
    image: str | None = Field(default=None, min_length=1)
    """The image of all tasks, whatever their `container.def` says. It is needed for those that start from a `.sif`
    file."""
    use_images: bool = True
    """Whether tasks have images. If not, they start from the profile's image, or on `local` from this host's system."""
    user: str = Field(default="user", pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,31}$")
    """The user that the agent is. If a task does not make it, it is made, with the folder of its name in /home."""
    python: str | None = Field(default=None, pattern="^/")
    """The Python that runs the tests, with pytest 7 or newer. None is the slot's `python3`. On `local`, the slots must
    see it (`visible_paths` of the profile)."""
    post_timeout_s: float = Field(default=600, gt=0)
    """Time limit in seconds of a task's `%post`."""
    test_timeout_s: float = Field(default=300, gt=0)
    """Time limit in seconds of a file of tests."""
    max_upload_bytes: int = Field(default=64 << 20, gt=0)
    """The largest size of what `%files` copies."""
