"""Parses a row of a SWE-smith dataset into a task: finds the variant by the fields present, and checks every field.

The meaning of a row's `patch` and `base_commit` depends on the variant:

| variant | recognised by | `base_commit` is | `patch` makes |
|---|---|---|---|
| `swe-smith` | no `base_commit` | the repository's own, clean | the bug |
| `swe-smith-2025` | `base_commit`, `created_at`, no `text`, `repo` is `swesmith/…` | the buggy tree | the bug |
| `oracle` | `base_commit`, `text`, `repo` is not `swesmith/…` | buggy if `patch` fixes, else clean | to be said |
| `swe-bench` | `base_commit`, `test_patch`, no `text`, `repo` is not `swesmith/…` | the buggy tree | the fix |
| `r2e` | `parsed_commit_content`, `expected_output_json` | none: the image's own commit | the fix |

The rows of SWE-bench, SWE-bench Verified, SWE-bench Pro, SWE-Gym and similar datasets are `swe-bench`. A field that is
null counts as absent, and lower-case names are accepted. Some publishers put the row into a field of another row, as an
object or as JSON text. Any other combination of fields is refused, unless the configuration names the variant.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from hermes_core import DatasetError, validate_row
from hermes_swe_smith import doctests
from hermes_swe_smith.config import SweSmithConfig, image_name
from hermes_swe_smith.names import node_ids, test_file
from hermes_swe_smith.r2e import as_swe_bench

Variant = Literal["swe-smith", "swe-smith-2025", "oracle", "swe-bench", "r2e"]

_ID_FIELDS = ("instance_id", "id", "problem_id")
_MIRRORS = "swesmith/"
_R2E_FIELDS = {"parsed_commit_content", "expected_output_json"}
_GROUP = re.compile(r"(?<=[\w\]])@[^\[\]]*$")
_DEPTH = 4


def _as_list(value: object) -> object:
    """Return a value as a list. The value is a list, its text in JSON or Python, or an array, such as NumPy's."""
    if not isinstance(value, str):
        return value.tolist() if hasattr(value, "tolist") else value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise ValueError("must be a list, not a text that is none in JSON or Python")


def _strip_groups(node_ids: list[str]) -> list[str]:
    """Return node ids without the group `@…` that xdist appends."""
    starts = [(node_id, len(test_file(node_id))) for node_id in node_ids]
    return [node_id[:start] + _GROUP.sub("", node_id[start:]) for node_id, start in starts]


NodeIds = Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_strip_groups)]


class SweRow(BaseModel):
    """The fields of a row that are used, in all variants. Other fields of a row are ignored."""

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
    dockerhub_tag: str | None = None
    patch_is: Literal["bug", "fix"] | None = None
    """The meaning of the row's `patch`. It overrides the setting of the same name."""

    @field_validator("fail_to_pass", "pass_to_pass")
    @classmethod
    def _inside_the_checkout(cls, node_ids: list[str]) -> list[str]:
        for node_id in node_ids:
            path = test_file(node_id)
            if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path or "\n" in path:
                raise ValueError(f"has {node_id[:200]!r}, which names no file of the repository")
        return node_ids


@dataclass(frozen=True)
class SweTask:
    """One task. Its trees are made from a commit and at most two patches; `base_is` and `patch_is` say how."""

    instance_id: str
    repo: str
    """`owner/name` below `repo_base_url`, or an entry of `repos.json`."""
    variant: Variant
    base_commit: str | None
    """The commit; None is the commit that the repository's source names."""
    base_is: Literal["clean", "buggy"]
    patch: str
    """The diff; empty if the row has none. Then there is no reference solution."""
    patch_is: Literal["bug", "fix"]
    test_patch: str
    """A patch that changes tests of the clean tree; empty in SWE-smith's own rows."""
    problem_statement: str
    text: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image: str | None
    """The image of the task's sandboxes. None is the profile's image."""

    @property
    def directory(self) -> str:
        """Return the checkout's name in the slot's workspace: `funcy` for `swesmith/Suor__funcy.70fb6e8b`."""
        name = self.repo.split("/", 1)[1]
        if self.repo.startswith(_MIRRORS):
            name = re.sub(r"\.[0-9a-f]{8}$", "", name).split("__", 1)[-1]
        return name.removesuffix(".git").lstrip(".") or "repository"

    @property
    def has_test_patch(self) -> bool:
        """Return whether a patch adds the tests. Then the agent's tree keeps its older tests."""
        return self.variant in ("swe-bench", "r2e")

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Return every test of the task, each once."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def test_files(self) -> tuple[str, ...]:
        """Return the files of the tests that can't be doctests of a module, sorted."""
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


_NAMES = {
    name.lower(): name for name in (*(each.alias or key for key, each in SweRow.model_fields.items()), *_ID_FIELDS)
}
_NAMES |= {name.lower(): name for name in ("created_at", *_R2E_FIELDS)}
"""The usual name of each field that is read, by the name in lower case."""


def parse_row(row: Mapping[str, Any], where: str, config: SweSmithConfig) -> SweTask:
    """Return the task of a row.

    Args:
        where: the row's place, for messages: `tasks.jsonl, line 3`.

    Raises:
        DatasetError: a field is missing or wrong, or the row is ambiguous; the message names place, instance and field.
        UnsupportedRow: the row's tests can't be run.
    """
    fields = _fields(row)
    r2e = config.variant == "r2e" or (config.variant == "auto" and fields.keys() >= _R2E_FIELDS)
    if r2e:
        fields = as_swe_bench(fields, where)
    for name in _ID_FIELDS:
        if name in fields:
            fields["instance_id"] = fields[name]
            break
    if fields.get("instance_id"):
        where = f"{where}, instance {str(fields['instance_id'])[:200]!r}"
    parsed = validate_row(SweRow, fields, where, _field_hint)
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
    return SweTask(
        instance_id=parsed.instance_id,
        repo=parsed.repo,
        variant=variant,
        base_commit=parsed.base_commit,
        base_is=base_is,
        patch=_end_line(parsed.patch or ""),
        patch_is=patch_is,
        test_patch=_end_line(parsed.test_patch or ""),
        problem_statement=parsed.problem_statement,
        text=parsed.text or "",
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        image=_image(parsed, where, config),
    )


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that are not null, under their usual names. If a field contains another row with the
    tests, its fields are included."""
    fields = {key: value for key, value in row.items() if value is not None}
    if not _names_tests(fields):
        fields = _inner(fields, _DEPTH) or fields
    return {_NAMES[key.lower()]: value for key, value in fields.items() if key.lower() in _NAMES} | fields


def _names_tests(fields: Mapping[str, Any]) -> bool:
    return "fail_to_pass" in map(str.lower, fields) or fields.keys() >= _R2E_FIELDS


def _inner(fields: Mapping[str, Any], depth: int) -> dict[str, Any] | None:
    """Return the fields together with the fields of a row with tests that is inside a field, up to `depth` levels down;
    None if there is no such row."""
    if _names_tests(fields):
        return dict(fields)
    for value in fields.values() if depth else ():
        inside = _object(value)
        if inside is not None and (found := _inner(inside, depth - 1)):
            return {**fields, **found}
    return None


def _object(value: object) -> dict[str, Any] | None:
    """Return the fields that are not null of an object or of an object's JSON text; None for any other value."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return None
    return {key: each for key, each in value.items() if each is not None}


def _image(row: SweRow, where: str, config: SweSmithConfig) -> str | None:
    if config.image_template:
        if "{dockerhub_tag}" in config.image_template and not row.dockerhub_tag:
            raise DatasetError(f"{where}, field 'dockerhub_tag' is missing or empty", hint="image_template has it")
        return image_name(config.image_template, row.instance_id, row.dockerhub_tag or "")
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


def _patch_is(row: SweRow, variant: Variant, where: str, config: SweSmithConfig) -> Literal["bug", "fix"]:
    if not row.patch and variant.startswith("swe-smith"):
        raise DatasetError(f"{where}, field 'patch' is missing or empty", hint="it is the diff that makes the bug")
    setting = None if config.patch_is == "auto" else config.patch_is
    if row.patch_is and setting and row.patch_is != setting:
        raise DatasetError(
            f"{where}, field 'patch_is' is {row.patch_is!r}, and the setting patch_is is {setting!r}",
            hint="leave out the setting, or set it to auto: then the row decides",
        )
    meaning = row.patch_is or setting
    if meaning is None and variant == "oracle" and row.patch:
        raise DatasetError(
            f"{where}, field 'patch' may make the bug or fix it in this variant",
            hint="set patch_is to bug or fix, or give each row a field patch_is; `hermes-rl validate` tells which",
        )
    return meaning or ("bug" if variant.startswith("swe-smith") else "fix")


def _end_line(patch: str) -> str:
    """Return the patch with a line end after its last line, without which git calls a patch corrupt."""
    return patch + "\n" if patch and not patch.endswith("\n") else patch


def _field_hint(place: str) -> str:
    if place.startswith(("FAIL_TO_PASS", "PASS_TO_PASS")):
        return "a list of pytest node ids, or such a list as text of JSON or Python"
    return {
        "instance_id": "each row needs a text in instance_id, id or problem_id",
        "repo": "owner/name, or swesmith/<owner>__<name>.<commit8>",
        "patch_is": "bug or fix: what `patch` makes of the tree",
        "base_commit": "a full commit id: 40 hexadecimal digits",
    }.get(place, "the fields of each kind of row are in the plugin's README, and in docs/guides/swe-datasets.md")
