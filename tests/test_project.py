"""The files of the project itself agree with each other: what a change of one of them forgets, fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = sorted(path.stem for path in ROOT.glob("requirements/*.lock"))


def asked(name: str) -> list[Requirement]:
    """What `requirements/NAME.in` asks for, with what the files that it includes ask for."""
    found: list[Requirement] = []
    for line in (ROOT / "requirements" / f"{name}.in").read_text().splitlines():
        if line.startswith("-r "):
            found += asked(line.removeprefix("-r ").removesuffix(".in"))
        elif line and not line.startswith(("#", "-c ")):
            found.append(Requirement(line))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_what_is_asked_for_with_hashes_and_without_addresses(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    assert "://" not in text and "--index-url" not in text
    _, *entries = re.split(r"^(?=[\w-])", text, flags=re.MULTILINE)
    versions = dict(entry.split(maxsplit=1)[0].split("==") for entry in entries)
    assert all(" \\\n    --hash=sha256:" in entry for entry in entries)
    assert versions.keys().isdisjoint({"torch", "triton"}), "`make lock` leaves out torch and what only torch needs"
    for requirement in asked(name):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), f"make lock NAMES={name}"


def test_every_list_of_requirements_has_its_lock() -> None:
    assert sorted(path.stem for path in ROOT.glob("requirements/*.in")) == sorted([*LOCKS, "torch"])
