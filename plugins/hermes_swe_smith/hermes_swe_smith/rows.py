"""Parses a row of a SWE-smith dataset into a task: tells the variants apart by their fields, and checks every field.

What a row's `patch` and `base_commit` mean depends on where the row is from:

| variant | told by | `base_commit` is | `patch` makes |
|---|---|---|---|
| `swe-smith` | no `base_commit` | the repository's own, clean | the bug |
| `swe-smith-2025` | `base_commit`, `created_at`, no `text`, `repo` is `swesmith/…` | the buggy tree | the bug |
| `oracle` | `base_commit`, `text`, `repo` is not `swesmith/…` | buggy if `patch` mends, else clean | to be said |
| `swe-bench` | `base_commit`, `test_patch`, no `text`, `repo` is not `swesmith/…` | the buggy tree | the fix |
| `r2e` | `parsed_commit_content`, `expected_output_json` | none: the image's own commit | the fix |

The rows of SWE-bench, SWE-bench Verified, SWE-Gym and others of their shape are `swe-bench`. A field that is null
counts as absent. Any other combination is refused until the configuration says what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from hermes_core import DatasetError, checked_row
from hermes_swe_smith import doctests
from hermes_swe_smith.config import SweSmithConfig, image_name
from hermes_swe_smith.names import node_ids, test_file
from hermes_swe_smith.r2e import as_swe_bench

Variant = Literal["swe-smith", "swe-smith-2025", "oracle", "swe-bench", "r2e"]

_ID_FIELDS = ("instance_id", "id", "problem_id")
_MIRRORS = "swesmith/"
_R2E_FIELDS = {"parsed_commit_content", "expected_output_json"}


def _as_list(value: object) -> object:
    """Return a list from a list, JSON in a string, or an array of the library that read the file."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("must be a list, not a text that is none in JSON") from None
    return value.tolist() if hasattr(value, "tolist") else value


NodeIds = Annotated[list[str], BeforeValidator(_as_list)]


class Row(BaseModel):
    """The fields of a row that are used, in all variants. A row may have others."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    instance_id: str = Field(min_length=1)
    repo: str = Field(pattern=r"^[\w-][\w.-]*/[\w-][\w.-]*$")
    problem_statement: str = Field(min_length=1)
    fail_to_pass: NodeIds = Field(min_length=1, alias="FAIL_TO_PASS")
    pass_to_pass: NodeIds = Field(alias="PASS_TO_PASS")
    patch: str | None = None
    test_patch: str | None = None
    base_commit: str | None = Field(default=None, pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")
    text: str | None = None
    image_name: str | None = None
    docker_image: str | None = None
    patch_is: Literal["bug", "fix"] | None = None
    """What the row's `patch` is. It overrides the setting of the same name."""

    @field_validator("fail_to_pass", "pass_to_pass")
    @classmethod
    def _inside_the_checkout(cls, node_ids: list[str]) -> list[str]:
        for node_id in node_ids:
            path = test_file(node_id)
            if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path or "\n" in path:
                raise ValueError(f"has {node_id[:200]!r}, which names no file of the repository")
        return node_ids


@dataclass(frozen=True)
class Task:
    """One task. Its trees follow from one commit and at most two patches; `base_is` and `patch_is` say how."""

    instance_id: str
    repo: str
    """`owner/name` below `repo_base_url`, or an entry of `repos.json`."""
    variant: Variant
    base_commit: str | None
    """None means the repository's own."""
    base_is: Literal["clean", "buggy"]
    patch: str
    """Empty if the row has none: then there is no reference solution."""
    patch_is: Literal["bug", "fix"]
    test_patch: str
    """A patch that changes tests of the clean tree; empty in SWE-smith's own rows."""
    problem_statement: str
    text: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image: str | None
    """The image that its sandboxes are made from. None means the profile's image."""

    @property
    def directory(self) -> str:
        """Return the checkout's name in the slot's workspace: `funcy` for `swesmith/Suor__funcy.70fb6e8b`."""
        name = self.repo.split("/", 1)[1]
        if self.repo.startswith(_MIRRORS):
            name = re.sub(r"\.[0-9a-f]{8}$", "", name).split("__", 1)[-1]
        return name.removesuffix(".git").lstrip(".") or "repository"

    @property
    def has_test_patch(self) -> bool:
        """Return whether the tests are those of a patch. Then the agent's tree keeps its own, which are older."""
        return self.variant in ("swe-bench", "r2e")

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Return every test of the task, each once."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def test_files(self) -> tuple[str, ...]:
        """Return the files of all tests that can't be doctests of a module, sorted."""
        return tuple(sorted({test_file(node_id) for node_id in self.node_ids if not _may_be_doctest(node_id)}))

    @property
    def doctests(self) -> dict[str, list[str]]:
        """Return the names of possible doctests of a module, by file: `pkg.mod.func` in `pkg/mod.py`."""
        found: dict[str, list[str]] = {}
        for node_id in filter(_may_be_doctest, self.node_ids):
            path = test_file(node_id)
            found.setdefault(path, []).append(node_id[len(path) + 2 :])
        return found

    @property
    def fail_to_pass_files(self) -> tuple[str, ...]:
        """Return the files of the FAIL_TO_PASS tests, sorted."""
        return tuple(sorted({test_file(node_id) for node_id in self.fail_to_pass}))


def _may_be_doctest(node_id: str) -> bool:
    path = test_file(node_id)
    return bool(doctests.objects(path, node_id[len(path) + 2 :]))


def parse_row(row: Mapping[str, Any], where: str, config: SweSmithConfig) -> Task:
    """Return a row as a task.

    Args:
        where: the row's place, for error messages: `tasks.jsonl, line 3`.

    Raises:
        DatasetError: a field is missing or wrong, or the row is ambiguous; names place, instance and field.
        Refused: the row's tests can't be run.
    """
    fields = {key: value for key, value in row.items() if value is not None}
    r2e = config.variant == "r2e" or (config.variant == "auto" and fields.keys() >= _R2E_FIELDS)
    if r2e:
        fields = as_swe_bench(fields, where)
    for name in _ID_FIELDS:
        if name in fields:
            fields["instance_id"] = fields[name]
            break
    if fields.get("instance_id"):
        where = f"{where}, instance {str(fields['instance_id'])[:200]!r}"
    parsed = checked_row(Row, fields, where, _field_hint)
    variant: Variant = "r2e" if r2e else _variant(fields, where, config)
    patch_is = _patch_is(parsed, variant, where, config)
    base_is: Literal["clean", "buggy"] = "clean"
    if variant == "swe-smith-2025" or (variant != "swe-smith" and (patch_is == "fix" or not parsed.patch)):
        base_is = "buggy"
    fail_to_pass, pass_to_pass = tuple(parsed.fail_to_pass), tuple(parsed.pass_to_pass)
    if variant == "swe-bench":
        patch = parsed.test_patch or ""
        fail_to_pass = node_ids(fail_to_pass, patch, f"{where}, field 'FAIL_TO_PASS'", drop=False)
        pass_to_pass = node_ids(pass_to_pass, patch, f"{where}, field 'PASS_TO_PASS'", drop=True)
    return Task(
        instance_id=parsed.instance_id,
        repo=parsed.repo,
        variant=variant,
        base_commit=parsed.base_commit,
        base_is=base_is,
        patch=_ended(parsed.patch or ""),
        patch_is=patch_is,
        test_patch=_ended(parsed.test_patch or ""),
        problem_statement=parsed.problem_statement,
        text=parsed.text or "",
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        image=_image(parsed, where, config),
    )


def _image(row: Row, where: str, config: SweSmithConfig) -> str | None:
    if config.image_template:
        return image_name(config.image_template, row.instance_id)
    if not config.use_image_name:
        return None
    if not (named := row.image_name or row.docker_image):
        raise DatasetError(
            f"{where}, field 'image_name' is missing or empty",
            hint="use_image_name needs it, or docker_image; image_template makes the names of images from ids",
        )
    return named


def _variant(fields: Mapping[str, Any], where: str, config: SweSmithConfig) -> Variant:
    if config.variant != "auto":
        if config.variant != "swe-smith" and "base_commit" not in fields:
            raise DatasetError(f"{where}, field 'base_commit' is missing", hint=f"variant={config.variant} needs it")
        return config.variant
    if "base_commit" not in fields and fields.get("test_patch"):
        raise DatasetError(
            f"{where}, field 'base_commit' is missing", hint="a row with a test_patch is one of SWE-bench, which has it"
        )
    if "base_commit" not in fields:
        return "swe-smith"
    mirror = str(fields["repo"]).startswith(_MIRRORS)
    if "text" in fields and not mirror:
        return "oracle"
    if "created_at" in fields and "text" not in fields and mirror:
        return "swe-smith-2025"
    if fields.get("test_patch") and "text" not in fields and not mirror:
        return "swe-bench"
    present = ", ".join(sorted(set(fields) & {"base_commit", "created_at", "text", "test_patch"}))
    raise DatasetError(
        f"{where}: a row with {present} and repo {str(fields['repo'])!r} could be of several variants",
        hint="set variant to swe-smith-2025 (base_commit is the buggy tree) or to oracle (see patch_is); or, if it is "
        "one of SWE-bench, add its test_patch",
    )


def _patch_is(row: Row, variant: Variant, where: str, config: SweSmithConfig) -> Literal["bug", "fix"]:
    if not row.patch and variant.startswith("swe-smith"):
        raise DatasetError(f"{where}, field 'patch' is missing or empty", hint="it is the diff that makes the bug")
    setting = None if config.patch_is == "auto" else config.patch_is
    if row.patch_is and setting and row.patch_is != setting:
        raise DatasetError(
            f"{where}, field 'patch_is' is {row.patch_is!r}, and the setting patch_is is {setting!r}",
            hint="leave out the setting, or set it to auto: then the row decides",
        )
    said = row.patch_is or setting
    if said is None and variant == "oracle" and row.patch:
        raise DatasetError(
            f"{where}, field 'patch' may make the bug or mend it in this variant",
            hint="set patch_is to bug or fix, or give each row a field patch_is; `hermes-rl validate` tells which",
        )
    return said or ("bug" if variant.startswith("swe-smith") else "fix")


def _ended(patch: str) -> str:
    """Return the patch with a line end after its last line. Without it git calls the patch corrupt."""
    return patch + "\n" if patch and not patch.endswith("\n") else patch


def _field_hint(place: str) -> str:
    if place.startswith(("FAIL_TO_PASS", "PASS_TO_PASS")):
        return "a list of pytest node ids, or such a list as JSON text"
    return {
        "instance_id": "each row needs a text in instance_id, id or problem_id",
        "repo": "owner/name, or swesmith/<owner>__<name>.<commit8>",
        "patch_is": "bug or fix: what `patch` makes of the tree",
        "base_commit": "a full commit id: 40 hexadecimal digits",
    }.get(place, "the fields of each kind of row are in the plugin's README, and in docs/swe-datasets.md")
