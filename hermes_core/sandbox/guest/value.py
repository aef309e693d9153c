"""The base class of values with named fields. Type checkers see a data class; at run time it is a SimpleNamespace.

Importing `dataclasses` and `typing` would take a third of the guest's start-up time.
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
