"""Groups as JSON, for the API and for files, without keeping the event loop from its other work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


async def group_json(group: Mapping[str, Any]) -> bytes:
    """A group as one line of ASCII, a rollout's list at a time: in between the event loop gets its turn.

    At once it would be a tenth of a second for a group of eight long rollouts, in a thread as well, as the encoder does
    not let go of the interpreter's lock.

    Raises:
        ValueError: a number is none.
    """
    parts = []
    for key, value in group.items():
        texts = []
        for row in value if isinstance(value, list) else (value,):
            texts.append(json.dumps(row, allow_nan=False))
            await asyncio.sleep(0)
        parts.append(f"{json.dumps(key)}: {'[' + ', '.join(texts) + ']' if isinstance(value, list) else texts[0]}")
    return f"{{{', '.join(parts)}}}".encode("ascii")
