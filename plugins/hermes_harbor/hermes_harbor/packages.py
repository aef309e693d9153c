"""Packages for the tests' own tools: pip, uv and apt find them in a folder of the driver, or in another index.

The settings are environment variables of the tests. The agent never sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from hermes_core import DatasetError, SlotCommands
from hermes_harbor.container import OFFERED, script, upload

_PIP = {"PIP_CONFIG_FILE": "/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Variables that make pip ignore configuration files, which an agent may have changed."""

_APT = f"""Dir::Etc::SourceList "{OFFERED}/.sources.list";
Dir::Etc::SourceParts "/dev/null";
"""


@dataclass(frozen=True)
class Packages:
    """The source of packages for the tests."""

    folder: Path | None = None
    """A folder to send to the sandbox; None if packages come from an index."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables for pip, uv and apt."""
    programs: str | None = None
    """A directory in the sandbox to put first in `PATH`."""


def packages_of(cache: str) -> Packages:
    """Return the source that the setting `package_cache` names: a folder, or the URL of an index. Blocking.

    Raises:
        DatasetError: `cache` names neither.
    """
    url = urlsplit(cache)
    if url.scheme in ("http", "https") and url.hostname:
        index = {"PIP_INDEX_URL": cache, "UV_DEFAULT_INDEX": cache}
        if url.scheme == "http":
            index |= {"PIP_TRUSTED_HOST": url.hostname, "UV_INSECURE_HOST": url.hostname}
        return Packages(variables={**_PIP, **index})
    folder = Path(cache).expanduser()
    if not folder.is_dir():
        raise DatasetError(
            f"package_cache: {cache} is neither a folder nor http://… or https://…",
            hint="name a folder of wheels, or the URL of an index",
        )
    links = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": OFFERED, "UV_OFFLINE": "1", "UV_FIND_LINKS": OFFERED}
    apt = {"APT_CONFIG": f"{OFFERED}/.apt.conf"} if (folder / "Packages").is_file() else {}
    programs = f"{OFFERED}/bin" if (folder / "bin").is_dir() else None
    return Packages(folder, {**_PIP, **links, **apt}, programs)


async def offer(commands: SlotCommands, packages: Packages, max_bytes: int) -> None:
    """Send the folder of packages to a sandbox, if there is one.

    Raises:
        SetupFailed: the folder is too large, or can't be read.
    """
    if packages.folder is None:
        return
    await script(commands, 'rm -rf "$1"', OFFERED)
    await upload(commands, packages.folder, OFFERED, max_bytes)
    if "APT_CONFIG" in packages.variables:
        await commands.write_file(f"{OFFERED}/.apt.conf", _APT.encode(), mode=0o644)
        source = f"deb [trusted=yes] file:{OFFERED} ./\n"
        await commands.write_file(f"{OFFERED}/.sources.list", source.encode(), mode=0o644)
