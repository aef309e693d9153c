"""What is said about the version of verifiers."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
from hermes_verifiers import versions


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


def test_the_tested_version_is_imported_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, versions.TESTED)
    with versions.tested():
        pass
    with pytest.raises(TypeError, match="ours"), versions.tested():
        raise TypeError("ours")
    assert not caplog.messages


def test_another_version_is_named_beside_the_tested_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, "0.9.1")
    said = f"tested with verifiers {versions.TESTED}, and this is verifiers 0.9.1"
    with caplog.at_level(logging.WARNING), versions.tested():
        pass
    assert [said in text for text in caplog.messages] == [True]
    with pytest.raises(ImportError, match=f"{said}: no name 'Env'.*pip install"), versions.tested():
        raise ImportError("no name 'Env'")


def test_a_missing_verifiers_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(ImportError, match=f"pip install 'verifiers=={versions.TESTED}'"), versions.tested():
        pass
