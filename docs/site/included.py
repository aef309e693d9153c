"""Writes the files that the guides show into them: `python docs/site/included.py`, after a change of one of the files.

A guide has `<!-- PATH -->`, with a path from the top of the repository, in the line before the block of code that shows
the file. A test compares the two.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SHOWN = re.compile(r"^<!-- (\S+) -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A file in a guide: its path, its language, its text."""


def written(guide):
    """Return a guide's text with the files as they are."""

    def shown(match):
        path, language, _ = match.groups()
        return f"<!-- {path} -->\n```{language}\n{(ROOT / path).read_text(encoding='utf-8')}```"

    return SHOWN.sub(shown, guide.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for each in sorted(ROOT.glob("docs/*/*.md")):
        each.write_text(written(each), encoding="utf-8")
