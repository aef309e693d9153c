"""The watchdog ends when, and only when, nobody beats its heart any more; under every shell at hand."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hermes_core.sandbox import watchdog

SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]


@contextmanager
def running(shell: str, file: Path, ttl_s: float, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    argv = list(watchdog.watchdog_command(str(file), ttl_s))
    argv[:1] = ["busybox", "sh"] if shell == "busybox" else [shell]
    process = subprocess.Popen(argv, env={"PATH": os.environ["PATH"]}, stderr=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=[SHELLS[0], *(pytest.param(each, marks=pytest.mark.full) for each in SHELLS[1:])])
def shell(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "heart 'beat'"


def test_a_heartbeat_that_stops_ends_it(shell: str, file: Path) -> None:
    file.write_text("1\n")
    with running(shell, file, 0.5) as process:
        for beat in range(2, 12):
            time.sleep(0.1)
            file.write_text(f"{beat}\n")
        assert process.poll() is None
        last = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - last > 0.3


def test_a_file_that_disappears_is_a_heartbeat_that_stopped(shell: str, file: Path) -> None:
    file.write_text("1\n")
    with running(shell, file, 0.4) as process:
        time.sleep(0.2)
        file.unlink()
        assert process.wait(20) == 0
        assert process.stderr.read() == b""


def test_an_empty_file_is_no_news(shell: str, file: Path) -> None:
    file.write_text("1\n")
    with running(shell, file, 0.4) as process:
        time.sleep(0.15)
        file.write_text("")
        assert process.wait(20) == 0


def test_before_the_first_heartbeat_there_is_a_grace(shell: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "START_GRACE_S", 1.5)
    begin = time.monotonic()
    with running(shell, file, 0.2) as process:
        assert process.wait(15) == 0
        assert time.monotonic() - begin > 1.2


def test_the_word_end_ends_it_at_once(shell: str, file: Path) -> None:
    file.write_text("1\n")
    with running(shell, file, 1000) as process:
        time.sleep(0.2)
        file.write_text(watchdog.END + "\n")
        assert process.wait(20) == 0


def test_term_ends_it_at_once_and_leaves_no_child(shell: str, file: Path) -> None:
    file.write_text("1\n")
    with running(shell, file, 1000, start_new_session=True) as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        time.sleep(0.1)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def test_the_terminals_interrupt_is_not_its_end(shell: str, file: Path) -> None:
    file.write_text("1\n")
    with running(shell, file, 1000) as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a user of its own, whose process limit is full")
@pytest.mark.skipif("dash" not in SHELLS, reason="bash waits long between its attempts to fork")
def test_a_full_process_limit_neither_ends_it_nor_keeps_it(file: Path, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if not directory.stat().st_mode & 0o001:
            file = Path("/dev/shm") / f"heartbeat-{os.getpid()}-{time.monotonic_ns()}"

    def without_processes() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        os.setgroups([])
        os.setgid(1_999_999_999)
        os.setuid(1_999_999_999)

    file.write_text("1\n")
    try:
        with running("dash", file, 3, preexec_fn=without_processes) as process:
            for beat in range(2, 30):
                time.sleep(0.1)
                file.write_text(f"{beat}\n")
            assert process.poll() is None
            assert process.wait(15) == 0
    finally:
        file.unlink()
