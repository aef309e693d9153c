"""Makes the virtual environment of a repository's tests, once for each sandbox and set of pins. Slots can only read it.

With known pins (`repos.json`), only these are installed: Python imports the project from the checkout, by its
`pythonpath`. Without pins, the project is installed with its dependencies and pytest, and then its own code is removed,
because agents could read the clean tree's code there, and so the fix.

An image with the repository has an environment, too, which is used as it is.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import SecretStr

from hermes_core import (
    CommandError,
    CommandResult,
    InfraError,
    NewSandbox,
    Settings,
    SetupFailed,
    SlotCommands,
    SlotHandle,
)
from hermes_swe_smith.network import pip_was_cut_off
from hermes_swe_smith.repos import RepositorySource, TestEnvironment
from hermes_swe_smith.scripts import wrapper
from hermes_swe_smith.workspace import PreparedRepository, check_undisturbed, operate, prepare_programs

LEAST_PIP = (22, 3)
"""The first pip that installs into another interpreter's environment (`--python`)."""

LEAST_PYTEST = 7
IMAGE_PYTHONS = ("/opt/miniconda3/envs/testbed/bin/python", "{checkout}/.venv/bin/python")
"""Paths of the tests' Python in images: of SWE-bench and SWE-Gym, and of R2E-Gym."""

_NEWEST_MINOR = 20

# Imports pip's version, because `pip --version` takes half a second.
_VERSIONS = """
import sys
try:
    from pip import __version__ as pip
except Exception:
    pip = "none"
print("%d.%d" % sys.version_info[:2], pip, sys.executable)
"""

# Prints the names of all modules of the environment. Files of the project must not hide them.
_NOTES = """
import json, os, pkgutil, sys, sysconfig
names = set(sys.builtin_module_names) | set(getattr(sys, "stdlib_module_names", ()))
places = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
names.update(module.name for module in pkgutil.iter_modules(places))
print(json.dumps({"modules": sorted(names), "pythonpath": sys.argv[1:]}))
"""

# Prints the modules of an image's environment, and the directories of the checkout from which it imports the project.
_LOOK_AROUND = """
import json, os, pkgutil, sys, sysconfig
checkout = os.path.realpath(sys.argv[1]) + os.sep
places = [entry for entry in sys.path if "site-packages" not in entry]
for name, module in list(sys.modules.items()):
    if name.startswith("__editable__"):
        places += [os.path.dirname(place) for place in getattr(module, "MAPPING", {}).values()]
places = [os.path.realpath(place) + os.sep for place in places]
roots = [place[len(checkout):].strip(os.sep) or "." for place in places if place.startswith(checkout)]
if not roots:
    roots = ["src"] if os.path.isdir(checkout + "src") else ["."]
names = set(sys.builtin_module_names) | set(getattr(sys, "stdlib_module_names", ()))
kinds = ("stdlib", "platstdlib", "purelib", "platlib")
names.update(module.name for module in pkgutil.iter_modules([sysconfig.get_path(kind) for kind in kinds]))
try:
    import pytest
    version, place = pytest.__version__, os.path.realpath(pytest.__file__)
except ImportError:
    version = place = ""
print(json.dumps({
    "modules": sorted(names),
    "pythonpath": list(dict.fromkeys(roots)),
    "pytest": version,
    "of_checkout": place.startswith(checkout) and "site-packages" not in place,
}))
"""

# Removes the project's installed files except its metadata. Entry points are removed, too, because their code is gone.
_TAKE_OUT = """
import importlib.metadata, os, shutil, sys
for distribution in list(importlib.metadata.distributions()):
    if sys.argv[1] not in (distribution.read_text("direct_url.json") or ""):
        continue
    for file in list(distribution.files or ()):
        path = str(distribution.locate_file(file))
        if ".dist-info" in str(file) and os.path.basename(path) not in ("entry_points.txt", "direct_url.json"):
            continue
        if os.path.exists(path):
            os.unlink(path)
        parent = os.path.dirname(path)
        shutil.rmtree(os.path.join(parent, "__pycache__"), ignore_errors=True)
        while os.path.isdir(parent) and not os.listdir(parent):
            os.rmdir(parent)
            parent = os.path.dirname(parent)
"""


# Installs the project's metadata. Its code is imported from a checkout.
_ADD_METADATA = """
import importlib.metadata, json, os, sys, sysconfig
name, files = json.load(sys.stdin)
try:
    importlib.metadata.distribution(name)
except importlib.metadata.PackageNotFoundError:
    for path, text in files.items():
        path = os.path.join(sysconfig.get_path("purelib"), path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
"""


def installer_variables(patterns: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the driver's variables whose names match a pattern, for git and pip while a sandbox is prepared."""
    variables = os.environ if environ is None else environ
    return {name: value for name, value in variables.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}


async def prepare_environment(
    site: SlotHandle | NewSandbox,
    source: RepositorySource,
    repository: PreparedRepository,
    env: Mapping[str, str],
    timeout_s: float,
    *,
    image_python: str = "",
) -> TestEnvironment:
    """Return the environment of a repository's tests on the site's sandbox. Make it there if it is missing.

    Args:
        repository: the repository on the same sandbox. The project's commands get wrappers in the environment, which
            call the checkout in PYTHONPATH.
        env: variables for the installer only.
        image_python: the interpreter to use if the image has the repository.

    Raises:
        SetupFailed: the Python version is missing, or the installation failed.
    """

    async def build(commands: SlotCommands, directory: str) -> None:
        installer = Installer(commands, directory, env, timeout_s)
        python, has_pip = await installer.find_python(source.python)
        await installer.make_venv(python, has_pip)
        if source.requirements is not None:
            await installer.install(source.requirements)
            pythonpath = source.pythonpath or (".",)
        else:
            pythonpath = await installer.install_project(repository, programs)
        await installer.add_scripts(repository.scripts)
        await installer.add_metadata(repository.metadata)
        notes = await installer.run([f"{directory}/venv/bin/python", "-I", "-c", _NOTES, *pythonpath], "looking around")
        await commands.write_file(f"{directory}/notes.json", notes.stdout)

    if source.checkout is not None:
        return await _image_environment(site, source, source.checkout, image_python)
    programs = await prepare_programs(site)
    directory = await site.prepare(f"swe-smith-env-{environment_key(source, repository)}", build)
    if source.pythonpath is not None:
        return TestEnvironment(directory, source.pythonpath)
    notes = await site.commands.read_file(f"{directory}/notes.json")
    return TestEnvironment(directory, tuple(json.loads(notes.data)["pythonpath"]))


async def _image_environment(
    site: SlotHandle | NewSandbox, source: RepositorySource, checkout: str, python: str
) -> TestEnvironment:
    """Return the image's own environment, after a check of its pytest.

    Raises:
        SetupFailed: the interpreter is missing, or its pytest is missing or can't be used.
    """

    async def build(commands: SlotCommands, directory: str) -> None:
        candidates = [python] if python else [place.format(checkout=checkout) for place in IMAGE_PYTHONS]
        for place in candidates:
            argv = [place, "-I", "-c", _LOOK_AROUND, checkout]
            try:
                done = await commands.run(argv, cwd=directory, timeout_s=60)
            except CommandError as error:
                if error.code not in ("not_found", "permission"):
                    raise
                continue
            check_undisturbed("looking around", done)
            if not done.ok:
                raise SetupFailed(f"the image's {place} can't be used: {done.error_text.strip()[-1000:]}")
            notes = json.loads(done.text)
            _check_pytest(notes, place)
            await commands.write_file(f"{directory}/notes.json", json.dumps({**notes, "python": place}).encode())
            return
        raise SetupFailed(
            f"the image has no Python in {', '.join(candidates)}",
            hint="set image_python to the interpreter of the tests' environment, which slots must be able to read",
        )

    suffix = hashlib.sha256(python.encode()).hexdigest()[:8]
    directory = await site.prepare(f"swe-smith-image-{source.key}-{suffix}", build)
    notes = json.loads((await site.commands.read_file(f"{directory}/notes.json")).data)
    return TestEnvironment(directory, tuple(notes["pythonpath"]), notes["python"])


def _check_pytest(notes: Mapping[str, Any], place: str) -> None:
    version = str(notes["pytest"])
    if notes["of_checkout"]:
        raise SetupFailed(
            f"the tests' pytest is the project itself ({place})", hint="leave out the rows of such projects"
        )
    if not version or int(version.partition(".")[0]) < LEAST_PYTEST:
        raise SetupFailed(
            f"{place} has {f'pytest {version}' if version else 'no pytest'}; {LEAST_PYTEST}.0 or newer is needed",
            hint="leave out such rows, or take the repository with other requirements from repos.json",
        )


def environment_key(source: RepositorySource, repository: PreparedRepository) -> str:
    """Return the key of an environment. Repositories with equal pins, commands and metadata have the same key."""
    if source.requirements is None:
        return source.key
    commands = [f"{name}={target}" for name, target in sorted(repository.scripts.items())]
    metadata = [f"{path}={text}" for path, text in sorted(repository.metadata.items())]
    pins = "\n".join((source.python, *sorted(source.requirements), *commands, *metadata))
    return hashlib.sha256(pins.encode()).hexdigest()[:16]


class Installer:
    """Makes one environment, as the preparation user."""

    def __init__(self, commands: SlotCommands, directory: str, env: Mapping[str, str], timeout_s: float) -> None:
        self._commands = commands
        self._directory = directory
        self._env = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1", **env}
        self._redact = Settings(
            secrets={name: SecretStr(value) for name, value in env.items() if "@" in value}
        ).redactor()
        self._timeout_s = timeout_s
        self._pip: list[str] = []

    async def run(self, argv: list[str], what: str, *, stdin: bytes | None = None) -> CommandResult:
        """Run a step with the installer's variables.

        Args:
            what: the step's name, for messages.

        Raises:
            SetupFailed: the step failed; the message has the end of its output.
            InfraError: the package index could not be reached.
            Disturbed: the step was killed.
        """
        done = await self._commands.run(
            argv, cwd=self._directory, env=self._env, stdin=stdin, timeout_s=self._timeout_s
        )
        check_undisturbed(what, done)
        if not done.ok:
            output = self._redact((done.error_text.strip() or done.text.strip())[-2000:])
            reason = f"no end after {self._timeout_s:g} s; {output}" if done.timed_out else output
            kind = InfraError if pip_was_cut_off(done.error_text) else SetupFailed
            raise kind(
                f"preparing the test environment failed at {what}: {reason}",
                hint="check the pins, the package index (PIP_INDEX_URL) and the network, which a profile with network: "
                "none and --confine take away; or raise install_timeout_s",
            )
        return done

    async def find_python(self, requirement: str) -> tuple[str, bool]:
        """Return an interpreter of a version, and whether its pip can install into another environment.

        Args:
            requirement: `3.11`, `>=3.9`, or empty for any version.
        """
        without_pip = ""
        for name in _candidates(requirement):
            version, pip, path = await self._versions(name)
            if not _fits(version, requirement):
                continue
            if _is_pip_for_others(pip):
                return path, True
            without_pip = without_pip or path
        if not without_pip:
            raise SetupFailed(
                f"the sandbox has no Python {requirement or '3'}",
                hint=f"install python{requirement.removeprefix('>=')} there, or take an image or profile that has it",
            )
        return without_pip, False

    async def make_venv(self, python: str, has_pip: bool) -> None:
        """Make an empty environment. With `has_pip`, the interpreter's pip is used, because a copy takes seconds to
        install."""
        target = f"{self._directory}/venv"
        bare = ["--without-pip"] if has_pip else []
        await self.run([python, "-I", "-m", "venv", *bare, target], f"{python} -m venv (is python3-venv installed?)")
        own = f"{target}/bin/python"
        self._pip = [python, "-I", "-m", "pip", "--python", own] if has_pip else [own, "-I", "-m", "pip"]

    async def install(self, requirements: Sequence[str]) -> None:
        """Install these requirements."""
        listing = "".join(f"{line}\n" for line in requirements).encode()
        await self._commands.write_file(f"{self._directory}/requirements.txt", listing)
        if requirements:
            await self.run([*self._pip, "install", "-q", "-r", "requirements.txt"], "pip install")

    async def add_scripts(self, declared: Mapping[str, str]) -> None:
        """Make wrappers of the project's commands whose names are still free."""
        for name, target in declared.items():
            path = f"{self._directory}/venv/bin/{name}"
            try:
                await self._commands.stat(path)
            except CommandError:
                text = wrapper(f"{self._directory}/venv/bin/python", target)
                await self._commands.write_file(path, text.encode(), mode=0o755)

    async def add_metadata(self, files: Mapping[str, str]) -> None:
        """Make the project's `.dist-info`, if the pins did not install it."""
        if files:
            name = next(iter(files)).partition("-")[0]
            argv = [f"{self._directory}/venv/bin/python", "-I", "-c", _ADD_METADATA]
            await self.run(argv, "the project's metadata", stdin=json.dumps([name, files]).encode())

    async def install_project(self, repository: PreparedRepository, programs: str) -> tuple[str, ...]:
        """Install the project's dependencies and pytest. Return the directories from which the project is imported."""
        checkout = f"{repository.directory}/checkout"
        await operate(self._commands, programs, "check_out", {"repo": repository.git_dir, "to": checkout})
        try:
            await self.run([*self._pip, "install", "-q", "pytest", checkout], "pip install of the project")
            source = await self._commands.run(["test", "-d", f"{checkout}/src"])
        finally:
            await self._commands.remove(checkout, recursive=True)
        await self.run([f"{self._directory}/venv/bin/python", "-I", "-c", _TAKE_OUT, checkout], "taking it out again")
        return ("src",) if source.ok else (".",)

    async def _versions(self, name: str) -> tuple[str, str, str]:
        """Return the interpreter's version, the version of its pip, and its path; three empty texts if there is no such
        interpreter."""
        try:
            done = await self._commands.run([name, "-I", "-c", _VERSIONS], timeout_s=self._timeout_s)
        except CommandError:
            return "", "", ""
        version, _, rest = done.text.strip().partition(" ")
        pip, _, path = rest.partition(" ")
        return (version, pip, path) if done.ok else ("", "", "")


def _is_pip_for_others(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= LEAST_PIP


def _candidates(requirement: str) -> list[str]:
    """Return names of programs that may be a Python of the required version, the likeliest first."""
    version = requirement.removeprefix(">=")
    if not version:
        return ["python3"]
    if version == requirement:
        return [f"python{version}", "python3"]
    major, minor = version.split(".")
    return ["python3", *(f"python{major}.{n}" for n in range(int(minor), _NEWEST_MINOR))]


def _fits(version: str, requirement: str) -> bool:
    if not version or not requirement:
        return bool(version)
    least = requirement.removeprefix(">=")
    return version == least or (least != requirement and _numbers(version) >= _numbers(least))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
