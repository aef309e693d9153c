"""Variables of the driver's host in a task's settings: `${NAME}` and `${NAME:-default}`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hermes_core import DatasetError

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolve_text(text: str, where: str) -> str:
    """Return a text that may be `${NAME}` or `${NAME:-default}`, of this host's environment.

    Args:
        where: what it is, for messages.

    Raises:
        DatasetError: the variable is not set, and there is no default.
    """
    template = _VARIABLE.fullmatch(text)
    found = text if template is None else os.environ.get(template[1], template[2])
    if found is None:
        raise DatasetError(f"{where}: {text} is not set here", hint=f"export {text[2:-1]}=…")
    return found


def resolve_variables(variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Return variables whose values may be those of this host. Raise as `resolve_text`."""
    return {name: resolve_text(value, f"{where}: {name}") for name, value in variables.items()}
