"""Fills in variables of this host in a task's settings: `${NAME}` and `${NAME:-default}`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hermes_core import DatasetError

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolve_text(text: str, where: str) -> str:
    """Return the value of a text that is `${NAME}` or `${NAME:-default}`. Any other text is returned unchanged.

    Args:
        where: the text's place, for messages.

    Raises:
        DatasetError: the variable is not set, and there is no default.
    """
    template = _VARIABLE.fullmatch(text)
    value = text if template is None else os.environ.get(template[1], template[2])
    if value is None:
        raise DatasetError(f"{where}: {text} is not set here", hint=f"export {text[2:-1]}=…")
    return value


def resolve_variables(variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the variables with `resolve_text` applied to each value."""
    return {name: resolve_text(value, f"{where}: {name}") for name, value in variables.items()}
