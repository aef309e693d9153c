"""What is said about the version of verifiers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from hermes_verifiers import versions


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(versions, "version", found)


def test_the_tested_version_is_imported_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, versions.TESTED)
    with versions.tested():
        pass
    with pytest.raises(TypeError, match="ours"), versions.tested():
        raise TypeError("ours")


def test_another_version_is_named_beside_the_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.9.1")
    said = f"tested with verifiers {versions.TESTED}, and this is 0.9.1"
    with pytest.warns(RuntimeWarning, match=said), versions.tested():
        pass
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(ImportError, match=f"{said}: no name 'Env'.*pip install"),
        versions.tested(),
    ):
        raise ImportError("no name 'Env'")


def test_a_missing_verifiers_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(ImportError, match=f"pip install 'verifiers=={versions.TESTED}'"), versions.tested():
        pass
