"""Make locks anew with uv: `python requirements/lock.py UV NAME… [OPTION…]`, which `make lock` calls.

`NAME.lock` is made of `NAME.in`, for the oldest Python that we support. What a lock pins already stays, as far as
`NAME.in` allows; uv's option `--upgrade` takes the newest instead.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.11"
TORCH = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
"""In no lock: users choose between builds for processors and for GPUs. `torch.in` names the one that we test with."""


def make_lock(uv: str, name: str, options: list[str]) -> None:
    """Write `NAME.lock`, without addresses of package indexes, torch, and what only torch needs."""
    command = [uv, "pip", "compile", "--quiet", "--python-version", PYTHON, "--generate-hashes", *options]
    command += ["--override", "torch.in", "--custom-compile-command", f"make lock NAMES={name}"]
    subprocess.run([*command, "--output-file", f"{name}.lock", f"{name}.in"], cwd=HERE, check=True)
    lock = HERE / f"{name}.lock"
    lock.write_text(drop(TORCH, lock.read_text()))


def drop(names: set[str], lock: str) -> str:
    """Return a lock without these packages, and without those that only they need."""
    header, *entries = re.split(r"^(?=\w)", lock, flags=re.MULTILINE)
    needed_by = {entry.partition("==")[0]: users(entry) for entry in entries}
    dropped = names & needed_by.keys()
    while more := {name for name, others in needed_by.items() if others <= dropped} - dropped:
        dropped |= more
    return header + "".join(entry for entry in entries if entry.partition("==")[0] not in dropped)


def users(entry: str) -> set[str]:
    """Return what a package is in a lock for: other packages and files of requirements, without mere constraints."""
    named = re.findall(r"^ +#(?: via|  ) +(\S.*)$", entry, re.MULTILINE)
    return {each for each in named if not each.startswith("-c ")}


if __name__ == "__main__":
    arguments = sys.argv[2:]
    given = [each for each in arguments if each.startswith("-")]
    for each in arguments:
        if each not in given:
            make_lock(sys.argv[1], each, given)
