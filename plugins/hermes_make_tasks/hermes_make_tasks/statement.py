"""Writes a task's problem statement: from a template, or by a model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hermes_core import Agent, AgentTask, ModelError

SHOWN = 2
"""Maximum number of failures that a statement shows."""
_LINES, _CHARS = 14, 900

_ASKED = """\
Below is a change that introduced a bug into a Python project, and the failures that it causes. Write the issue that a \
user of the project would report, who has seen the wrong behaviour and does not know the code behind it.

- Describe what was done, what happens, and what should happen. A short example that shows it is welcome.
- Do not say which function, line or change is the cause, and do not mention this change or its tests by name.
- Answer with the text of the issue alone: a title in the first line, then the description.

The change:

```diff
{patch}
```

The failures:

{failures}
"""

Failure = tuple[str, str]
"""A test's node id, and the end of its traceback."""


def from_template(project: str, shown: Sequence[Sequence[str]]) -> str:
    """Return a statement that shows examples, each with a title, and with the actual and the expected behaviour."""
    parts = [f"{project}: {shown[0][0]}"]
    for number, (title, code, happens) in enumerate(shown):
        parts.append(f"{f'Also, {title}.' if number else 'To see it:'}\n\n```python\n{code}\n```\n\n{happens}")
    return re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x…", plain("\n\n".join(parts))) + "\n"  # the same in each run


async def from_model(agent: Agent, key: str, patch: str, failures: Sequence[Failure]) -> str:
    """Return a statement that a model writes.

    Raises:
        ModelError: the model's endpoint failed, or its answer is empty.
    """
    shown = "\n\n".join(f"{plain(name)}:\n\n{_indent(plain(text))}" for name, text in failures[:SHOWN])
    asked = _ASKED.format(patch=patch[:8000], failures=shown)

    async def no_tools(*_: object) -> str:
        return '{"error": "there are no tools"}'

    async def no_solution() -> None:
        return None

    result = await agent.run(
        AgentTask(key, [{"role": "user", "content": asked}], [], no_tools, no_solution, seed_key=key)
    )
    said = result.messages[-1].get("content") if len(result.messages) > 1 else None
    text = plain(said).strip() if isinstance(said, str) else ""
    if not text:
        raise ModelError(
            "the model wrote no problem statement", hint="start again with the same --out, or another model"
        )
    return text[:20_000]


def plain(text: str) -> str:
    """Return a text of a stranger's program without terminal sequences, and without characters that can't be
    encoded."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return re.sub(r"[^\t\n -~\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _indent(text: str) -> str:
    lines = text[-4 * _CHARS :].rstrip().splitlines()[-_LINES:]
    kept = "\n".join(lines)[-_CHARS:]
    return "\n".join(f"    {line}" for line in kept.splitlines())
