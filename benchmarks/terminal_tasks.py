"""Makes tasks in the format of endless-terminals, each with a solution, and an image with the pytest that they need."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
SITE = "usr/local/lib/python3.11/dist-packages"
"""Where Debian 12's Python looks for packages of the system."""


@dataclass(frozen=True)
class Made:
    """The files of one task."""

    description: str
    post: str
    initial: str
    final: str
    solution: str
    environment: str = ""


def write_tasks(folder: Path, count: int, *, source: str, seed: int = 0) -> None:
    """Write so many task folders. Their `container.def` starts from the image `source`."""
    draw = random.Random(seed)
    for number in range(count):
        made = KINDS[number % len(KINDS)](draw)
        write_task(folder / f"task_{number:06d}", made, source=source)


def write_task(folder: Path, made: Made, *, source: str, bootstrap: str = "docker") -> Path:
    """Write one task's folder."""
    folder.mkdir(parents=True)
    definition = f"Bootstrap: {bootstrap}\nFrom: {source}\n\n%post\n{made.post}\n"
    definition += "%runscript\n    echo ready\n"
    if made.environment:
        definition += f"\n%environment\n{made.environment}"
    task = {"description": made.description, "truth": f"SECRET {made.solution}", "name": folder.name}
    files = {
        "task.json": json.dumps(task),
        "container.def": definition,
        "test_initial_state.py": made.initial,
        "test_final_state.py": made.final,
        "solution.sh": made.solution,
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


_USER = "    useradd -m -s /bin/bash user\n"


def _versions(draw: random.Random) -> Made:
    old, name = f"1.{draw.randint(0, 9)}.{draw.randint(0, 9)}", draw.choice(("alder", "birch", "cedar"))
    new = f"2.0.{draw.randint(0, 9)}"
    place = f"/home/user/{name}/package.json"
    post = (
        f"{_USER}    mkdir -p /home/user/{name}\n    cat <<EOF > {place}\n"
        f'{{"name": "{name}", "version": "{old}"}}\nEOF\n    chown -R user:user /home/user\n'
    )
    check = f"import json\n\ndef test_version():\n    assert json.load(open('{place}'))['version'] == '%s'\n"
    more = f"\ndef test_name():\n    assert json.load(open('{place}'))['name'] == '{name}'\n"
    return Made(
        f"The project in /home/user/{name} has version {old}. Set it to {new}, and change nothing else.",
        post,
        check % old,
        check % new + more,
        f"sed -i 's/{old}/{new}/' {place}\n",
        "    export HOME=/home/user\n    export PATH=/usr/local/bin:/usr/bin:/bin\n",
    )


def _logs(draw: random.Random) -> Made:
    lines = [f"{hour:02d}:{draw.randint(0, 59):02d} {draw.choice(('INFO', 'ERROR', 'WARN'))} job" for hour in range(24)]
    lines[draw.randrange(24)] = "12:00 ERROR disk"
    errors = [line for line in lines if "ERROR" in line]
    text = "\n".join(lines)
    return Made(
        "Copy the lines of /var/log/jobs.log that have ERROR to /home/user/errors.txt, in their order. Only you may "
        "read the file.",
        f"{_USER}    cat <<EOF > /var/log/jobs.log\n{text}\nEOF\n    chmod 644 /var/log/jobs.log\n",
        "def test_log():\n    assert len(open('/var/log/jobs.log').readlines()) == 24\n",
        "import os\n\ndef test_lines():\n"
        f"    assert open('/home/user/errors.txt').read().splitlines() == {errors!r}\n\n"
        "def test_rights():\n    assert os.stat('/home/user/errors.txt').st_mode & 0o777 == 0o600\n",
        "umask 077; grep ERROR /var/log/jobs.log > /home/user/errors.txt\n",
    )


def _table(draw: random.Random) -> Made:
    prices = [draw.randint(1, 500) for _ in range(draw.randint(20, 60))]
    rows = "\n".join(f"item{number},{price}" for number, price in enumerate(prices))
    return Made(
        "Write the sum of the second column of /srv/data/prices.csv, as one number, to /home/user/total.",
        f"{_USER}    mkdir -p /srv/data\n    cat <<'EOF' > /srv/data/prices.csv\n{rows}\nEOF\n",
        "import pytest\n\n@pytest.mark.parametrize('path', ['/srv/data/prices.csv', '/home/user'])\n"
        "def test_there(path):\n    import os\n    assert os.path.exists(path)\n",
        f"def test_total():\n    assert open('/home/user/total').read().strip() == '{sum(prices)}'\n",
        "awk -F, '{s += $2} END {print s}' /srv/data/prices.csv > /home/user/total\n",
    )


def _settings(draw: random.Random) -> Made:
    port = draw.randint(2000, 9000)
    return Made(
        f"The service in /etc/tiny/tiny.conf listens on port 80. Change it to {port}, and note the old port in "
        "/home/user/old-port.",
        f"{_USER}    mkdir -p /etc/tiny\n    printf 'name=tiny\\nport=80\\nmode=fast\\n' > /etc/tiny/tiny.conf\n"
        "    chown user:user /etc/tiny/tiny.conf\n",
        "def test_port():\n    assert 'port=80' in open('/etc/tiny/tiny.conf').read()\n",
        "class TestSettings:\n    def test_port(self):\n"
        f"        assert open('/etc/tiny/tiny.conf').read().splitlines() == ['name=tiny', 'port={port}', 'mode=fast']\n"
        "    def test_old(self):\n        assert open('/home/user/old-port').read().strip() == '80'\n",
        f"echo 80 > /home/user/old-port\nprintf 'name=tiny\\nport={port}\\nmode=fast\\n' > /etc/tiny/tiny.conf\n",
    )


def _folders(draw: random.Random) -> Made:
    names = draw.sample(("one", "two", "three", "four", "five", "six"), 4)
    make = "".join(f"    echo {name} > /home/user/in/{name}.TXT\n" for name in names)
    return Made(
        "Rename each file NAME.TXT in /home/user/in to NAME.txt and move it to /home/user/out.",
        f"{_USER}    mkdir -p /home/user/in\n{make}    chown -R user:user /home/user/in\n",
        f"import os\n\ndef test_in():\n    assert len(os.listdir('/home/user/in')) == {len(names)}\n",
        "import os\n\ndef test_in():\n    assert os.listdir('/home/user/in') == []\n\ndef test_out():\n"
        f"    assert sorted(os.listdir('/home/user/out')) == {sorted(f'{name}.txt' for name in names)!r}\n",
        "mkdir out; cd in; for each in *.TXT; do mv $each ../out/${each%.TXT}.txt; done\n",
    )


KINDS: tuple[Callable[[random.Random], Made], ...] = (_versions, _logs, _table, _settings, _folders)
"""Each makes a task of one kind, with its own container definition."""


def packages(folder: str = SITE) -> bytes:
    """Return a tar with this environment's pytest in a folder. It is plain Python, and works in others."""
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name in PACKAGES:
                spec = importlib.util.find_spec(name)
                assert spec is not None and spec.origin is not None, name
                place = Path(spec.origin)
                place = place.parent if place.name == "__init__.py" else place
                tar.add(place, f"{folder}/{place.name}", filter=_without_bytecode)
                for metadata in place.parent.glob(f"{name}-*.dist-info"):
                    tar.add(metadata, f"{folder}/{metadata.name}", filter=_without_bytecode)
        return buffer.getvalue()


def _without_bytecode(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    return None if "__pycache__" in member.name else member


@contextmanager
def image_with_pytest(base: str, tag: str) -> Iterator[str]:
    """Make an image from another one, with pytest for its Python, for as long as the block runs. Blocking."""
    import docker

    client = docker.from_env()
    try:
        container = client.containers.create(base, ["python3", "-m", "compileall", "-q", f"/{SITE}"], entrypoint="")
        try:
            container.put_archive("/", packages())
            container.start()
            container.wait()
            container.commit(tag)
        finally:
            container.remove(force=True)
        try:
            yield tag
        finally:
            client.images.remove(tag, force=True)
    finally:
        client.close()
