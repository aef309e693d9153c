"""The base of values with named fields: type checkers see data classes, and nothing is imported for them at run time.

`dataclasses` and `typing` would take a third of the time in which the guest starts.
"""

from __future__ import annotations

from types import SimpleNamespace

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import dataclass_transform

    @dataclass_transform(kw_only_default=True, frozen_default=True)
    class Value:
        """A value whose fields are given by name."""

else:
    Value = SimpleNamespace
