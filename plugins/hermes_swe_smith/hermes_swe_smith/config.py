"""The settings of the SWE-smith environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from hermes_core import DatasetConfig

DEMO = "demo"
"""The `dataset_name` of the tasks that ship with this package."""


class SweSmithConfig(DatasetConfig):
    """Settings of the environment `swe-smith`; on a command line `--env.dataset_name=tasks.jsonl`."""

    dataset_name: str = "NousResearch/SWE-smith-oracle"
    """A `.jsonl` or `.parquet` file, a folder of such files, `demo`, or the name of a dataset on the Hugging Face hub.
    An existing path wins over a name on the hub."""
    dataset_split: str = "train"
    """The split of a hub dataset; in a folder, the files whose names start with it."""
    variant: Literal["auto", "swe-smith", "swe-smith-2025", "oracle", "swe-bench", "r2e"] = "auto"
    """The kind of rows: `auto` decides by the fields present and refuses rows that fit two kinds. Their fields are
    in docs/guides/swe-datasets.md."""
    patch_is: Literal["auto", "bug", "fix"] = "auto"
    """Whether a row's `patch` makes the bug or fixes it. `auto` means `bug` for the SWE-smith variants, `fix` for
    `swe-bench` and `r2e`, and is refused for `oracle`, which has both. A row's own field `patch_is` decides for that
    row."""
    shuffle: bool = True
    """Whether the items are taken in an order drawn from `seed`."""
    python_only: bool = True
    """Leave out rows with a PASS_TO_PASS test outside of `.py` files."""
    score_include_fail_to_pass: bool = True
    """Score the FAIL_TO_PASS tests too. Without them an untouched buggy tree scores 1.0."""
    score: Literal["all", "fraction"] = "all"
    """`all`: 1.0 when every scored test passes, else 0.0. `fraction`: the share of the FAIL_TO_PASS tests that pass,
    as long as every PASS_TO_PASS test does, else 0.0."""
    prompt_mode: Literal["problem_statement", "problem_statement+text"] = "problem_statement"
    """The fields of a row that the agent is given as its task. Only `oracle` rows have `text`."""
    use_image_name: bool = False
    """Make each task's sandboxes from the image that its row names in `image_name` or `docker_image`, instead of the
    profile's."""
    image_template: str = ""
    """Make each task's sandboxes from the image with this name, in which `{id}` is the instance id in lower case,
    `{id_1776}` the same with `_1776_` for `__`, as SWE-bench names its images, `{id_s}` with `_s_`, as SWE-Gym does,
    and `{dockerhub_tag}` the row's field of this name, as SWE-bench Pro has it."""
    image_python: str = ""
    """The Python of the image that runs the tests, if the repository is in the image. Empty: conda's environment
    `testbed`, or the `.venv` of the repository."""
    hide_fail_to_pass: bool = True
    """Remove the files of the FAIL_TO_PASS tests from the agent's tree, as SWE-smith does."""
    canaries: bool = True
    """Add tests of ours that must fail to the task's tests. If they pass, code under test tampers with tests."""
    repo_base_url: str = "https://github.com"
    """A folder with `repos.json` and the bundles it names, the URL that repositories are cloned from, or
    `image:/testbed`: each task's image has its repository in that directory, and an environment that can test it."""
    install_timeout_s: float = Field(default=600, gt=0)
    """Time limit in seconds for cloning a repository, and for installing a set of test dependencies."""
    test_timeout_s: float = Field(default=600, gt=0)
    """Time limit in seconds for all of a task's tests together. After it the task counts as not solved."""
    installer_variables: tuple[str, ...] = (
        "PIP_*",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "*_PROXY",
        "*_proxy",
    )
    """The driver's environment variables that git and pip get while a sandbox is prepared, and nothing else does."""
    max_workspace_bytes: int = Field(default=256 << 20, gt=0)
    """The largest checkout that an agent may leave; a larger one counts as not solved."""
    max_patch_bytes: int = Field(default=8 << 20, gt=0)
    """The largest patch that an agent may leave; a larger one counts as not solved."""

    @field_validator("image_template")
    @classmethod
    def _check_names(cls, template: str) -> str:
        if template:
            image_name(template, "owner__name-1")
        return template


def image_name(template: str, instance_id: str, tag: str = "") -> str:
    """Return the name of an instance's image.

    Args:
        tag: the row's `dockerhub_tag`.

    Raises:
        ValueError: the template has another name in braces.
    """
    name = instance_id.lower()
    names = {
        "id": name,
        "id_1776": name.replace("__", "_1776_"),
        "id_s": name.replace("__", "_s_"),
        "dockerhub_tag": tag,
    }
    try:
        return template.format(**names)
    except (KeyError, IndexError, AttributeError, ValueError):
        known = ", ".join(f"{{{each}}}" for each in names)
        raise ValueError(f"{template!r}: only {known} are replaced") from None
