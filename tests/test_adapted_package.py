"""What an adapter says about the version of the package that it adapts."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest

from hermes_core import AdaptedPackage, ConfigError, NotInstalledError

CLOSE = AdaptedPackage("hermes-rl-x", "x", "1.16.0")
EXACT = AdaptedPackage("hermes-rl-x", "x", "1.16.0", exact=True)


@pytest.fixture
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The version that is installed, if any."""

    def version(name: str) -> str:
        assert name == "x"
        if request.param is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(request.param)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("tested", "found", "warns"),
    [
        (CLOSE, "1.16.0", False),
        (CLOSE, "1.16.3", False),
        (CLOSE, "1.17.0", True),
        (CLOSE, "2.0.0", True),
        (EXACT, "1.16.0", False),
        (EXACT, "1.16.3", True),
    ],
    indirect=["found"],
)
def test_another_version_is_named_beside_the_tested_one(
    tested: AdaptedPackage, found: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tested.check()
        with tested.imports():
            pass
    assert caplog.messages == [f"hermes-rl-x was tested with x 1.16.0, and this is x {found}"] * warns * 2


@pytest.mark.parametrize("found", ["1.16.3"], indirect=True)
def test_what_another_version_does_not_have_is_an_import_error(found: str) -> None:
    said = "tested with x 1.16.0, and this is x 1.16.3: no name 'Env'. Try pip install 'x==1.16.0'"
    with pytest.raises(ImportError, match=said), CLOSE.imports():
        raise ImportError("no name 'Env'")


@pytest.mark.parametrize("found", ["1.16.0"], indirect=True)
def test_errors_with_the_tested_version_are_our_own(found: str) -> None:
    with pytest.raises(TypeError, match="ours"), CLOSE.imports():
        raise TypeError("ours")


@pytest.mark.parametrize("found", [None], indirect=True)
@pytest.mark.parametrize("kind", [ConfigError, ImportError])
def test_a_missing_package_is_an_error_that_says_what_to_install(found: None, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"x is not installed \(pip install 'x==1.16.0'\)"):
        CLOSE.check()
    with pytest.raises(kind, match="x is not installed"), EXACT.imports():
        pytest.fail("it is imported from")
    assert issubclass(NotInstalledError, kind)
