"""A hook of MkDocs: adds the pages that are not in docs/ (README, plugins, reference) and adapts the links."""

import posixpath
import re
import sys
import tomllib
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).resolve().parents[2]

COPIED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/README.md": "pages.md",
    "examples/README.md": "examples/index.md",
    "benchmarks/RESULTS.md": "benchmark-results.md",
    **{f"plugins/{path.name}/README.md": f"plugins/{path.name}.md" for path in sorted(ROOT.glob("plugins/hermes_*"))},
}
"""Documents of the repository that become pages, each with its page."""

REFERENCE = {
    "__init__.pyi": "api/runs.md",
    "agents/base.py": "api/agents.md",
    "agents/model.py": "api/testing.md",
    "agents/parsers/base.py": "api/agents.md",
    "runs/options.py": "api/runs.md",
    "records/record.schema.json": "record-schema.md",
    "plugins/hookspecs.py": "hooks.md",
    "sandbox/commands.py": "api/runs.md",
    "sandbox/contract.py": "settings.md#backends",
    "settings.py": "settings.md#runtime",
    "tools/base.py": "api/tools.md",
}
"""Files of `hermes_core` to which documents lead, as a checkout has no reference; each with its page there."""

PAGES = {
    **COPIED,
    **{f"hermes_core/{path}": f"reference/{page}" for path, page in REFERENCE.items()},
    "plugins/hermes_atropos/hermes_atropos/flat.py": "reference/settings.md#atropos",
    "plugins/hermes_testing/hermes_testing/scripted_server.py": "reference/api/testing.md",
}

NOT_IN_NAV = {"benchmark-results.md"}

generated = set()
"""The pages of the reference that have no document. Their links are those of pages already."""

_URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
CHECKOUT_URL = _URLS["Changelog"].removesuffix("CHANGELOG.md")
"""The address of the checkout's files. READMEs of plugins have links to it, which also work on a package index."""

_LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")


def on_files(files, config):
    """Add the copied and the generated pages, and the files of the checkout that documents lead to."""
    for source, page in COPIED.items():
        add(files, config, page, (ROOT / source).read_text(encoding="utf-8"))
    for page, text in reference.pages().items():
        add(files, config, page, text)
        generated.add(page)
    for path in sorted(linked_files()):
        add(files, config, path, (ROOT / path).read_text(encoding="utf-8"))
    return files


def linked_files():
    """Return the files to which documents lead and for which there is no page."""
    found = set()
    for document in [*COPIED, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*/*.md"))]:
        for _, target, *_ in _LINK.findall(
            with_relative_links((ROOT / document).read_text(encoding="utf-8"), document)
        ):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
            if path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file():
                found.add(path)
    return found


def with_relative_links(markdown, document):
    """Return the text of a document with relative links in place of those to `CHECKOUT_URL`."""
    top = posixpath.relpath(".", posixpath.dirname(document) or ".")
    return markdown.replace(f"]({CHECKOUT_URL}", f"]({top}/")


def add(files, config, page, text):
    """Add a page that has no file in docs/."""
    file = File.generated(config, page, content=text)
    if page in NOT_IN_NAV:
        file.inclusion = file.inclusion.NOT_IN_NAV
    files.append(file)


def on_page_markdown(markdown, page, config, files):
    """Turn links between documents of the repository into links between pages."""
    pages = {page: source for source, page in COPIED.items()}
    here = page.file.src_uri
    source = pages.get(here, f"docs/{here}")

    def adapted(match):
        opening, target, anchor, closing = match.groups()
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = PAGES.get(wanted, wanted.removeprefix("docs/"))
        link = posixpath.relpath(there, posixpath.dirname(here) or ".")
        return f"{opening}{link}{anchor or ''}{closing}"

    return markdown if here in generated else _LINK.sub(adapted, with_relative_links(markdown, source))
