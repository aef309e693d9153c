"""The fixture `change_guest`: guests that your test starts have a fault in their source text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermes_core.sandbox.guest_client import bundle


@pytest.fixture
def change_guest() -> Iterator[Callable[[str, str], None]]:
    """`change_guest(old, new)`: in the test, guests are started with this in their sources replaced."""
    read = Path.read_text

    def change(old: str, new: str) -> None:
        def changed(path: Path, *encoding: str) -> str:
            return read(path, *encoding).replace(old, new)

        sandbox = Path(bundle.__file__).parents[1]
        assert any(old in read(path) for sent in ("guest", "linux") for path in (sandbox / sent).glob("*.py"))
        patch.setattr(Path, "read_text", changed)
        patch.setattr(bundle, "_compile_module", lambda *_: None)
        bundle.payload.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        yield change
    bundle.payload.cache_clear()
