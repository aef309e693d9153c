"""What a reward function carries out of a real slot: never more than a limit, whatever the agent left there."""

import io
import multiprocessing
import tarfile
import tracemalloc
from concurrent.futures import ProcessPoolExecutor

import pytest

from hermes_core.agents.baselines import NopAgent
from hermes_core.environment import Environment
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.rollout import tool_context
from hermes_core.rollout.tool_context import ToolContext
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime

DEEP = """\
import os
os.chdir("d")
for _ in range(19):
    os.mkdir("n" * 200)
    os.chdir("n" * 200)
open("f", "w").close()
"""


class Carrying(Environment):
    """Its verification is what the test says."""

    name = "carrying"

    def __init__(self, carry):
        super().__init__()
        self.carry = carry

    def items(self):
        return [{"id": "one"}]

    def format_prompt(self, item):
        return "leave something"

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        await self.carry(ToolContext(rollout))
        return 1.0, {}


async def carried(carry):
    records = []
    async with Runtime(load_entry_points=False) as runtime:
        await run_rollouts(
            runtime, Carrying(carry), NopAgent(), on_record=records.append, isolation="user", infra_retries=0
        )
    return records[0]


async def test_files_of_any_size_and_name_cost_no_more_than_a_limit(tmp_path):
    """A file of a terabyte costs an agent nothing, and was read whole into the driver's memory."""
    seen = {}
    place = tmp_path / "/".join(["local" * 40] * 2)

    async def carry(context):
        await context.terminal("truncate -s 1T huge; truncate -s 65M large; : > empty; mkdir d; echo x > d/short")
        await context.write_file("deep.py", DEEP)
        assert (await context.terminal("python3 deep.py"))["exit_code"] == 0
        seen["huge"] = [await context.read_file("huge"), await context.download_file("huge", tmp_path / "huge")]
        seen["large"] = [await context.read_file("large"), await context.download_file("large", tmp_path / "large")]
        seen["empty"] = await context.download_file("empty", tmp_path / "empty")
        seen["dir"] = await context.download_dir("d", place)

    record = await carried(carry)
    assert (record["reward"], record["failure"]) == (1.0, None)
    assert ["error" in each for each in seen["huge"]] == [True, True] and not (tmp_path / "huge").exists()
    assert "more than" in seen["large"][0]["error"] and seen["large"][1] == {"success": True, "bytes": 65 << 20}
    assert seen["empty"]["success"] and (tmp_path / "empty").read_bytes() == b""
    assert (place / "short").read_text() == "x\n" and seen["dir"]["left_out"]


@pytest.mark.full
async def test_a_directory_is_never_in_memory_as_a_whole(tmp_path):
    """Neither its tar nor its largest file."""
    size, peaks = 256 << 20, []

    async def carry(context):
        await context.terminal(f"mkdir d; echo x > d/small; head -c {size} /dev/zero > d/large")
        tracemalloc.start()
        try:
            seen = await context.download_dir("d", tmp_path / "d")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert seen["success"] and seen["bytes"] > size and seen["left_out"] == []

    record = await carried(carry)
    assert (record["reward"], record["failure"]) == (1.0, None)
    assert (tmp_path / "d/large").stat().st_size == size and (tmp_path / "d/small").read_text() == "x\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"], "and nothing stays beside it"
    assert peaks[0] < size / 16


async def test_a_directory_that_can_not_be_had_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tool_context, "MAX_DIR_BYTES", 1 << 20)
    seen = []

    async def carry(context):
        await context.terminal("mkdir d; truncate -s 2M d/large")
        seen.extend(
            [await context.download_dir("d", tmp_path / "a/b"), await context.download_dir("e", tmp_path / "c")]
        )

    assert (await carried(carry))["failure"] is None
    assert [each["success"] for each in seen] == [False, False] and all(each["error"] for each in seen)
    assert list(tmp_path.iterdir()) == []


def archive_of(*members):
    """A tar as a slot could forge it, of names and what is changed about each."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, changes in members:
            member = tarfile.TarInfo(name)
            for key, value in changes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return packed


def test_a_forged_archive_lands_nowhere_else_and_grows_no_larger(tmp_path):
    place = tmp_path / "place"
    sparse = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.size": str(1 << 50),
        "GNU.sparse.map": "0,1",
    }
    bad = {
        "../outside": {"size": 1},
        "a/../../outside": {"size": 1},
        "/outside": {"size": 1},
        "link": {"type": tarfile.SYMTYPE, "linkname": ".."},
        "hard": {"type": tarfile.LNKTYPE, "linkname": "../outside"},
        "device": {"type": tarfile.CHRTYPE},
        "sparse": {"size": 1, "pax_headers": sparse},
    }
    packed = archive_of(*bad.items(), ("link/through", {"size": 1}), ("good", {"size": 1, "mode": 0o4777}))
    assert tool_context._unpack_into(packed, place) == list(bad)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        *("place", "place/good", "place/link", "place/link/through")
    ]
    assert (place / "good").stat().st_mode & 0o7777 == 0o755


@pytest.mark.full  # measures memory, with a large archive
def test_many_members_cost_less_memory_than_their_archive(tmp_path):
    packed = archive_of(*((f"link-{n}", {"type": tarfile.SYMTYPE, "linkname": "x"}) for n in range(20_000)))
    # In a process of its own: what other threads of this one allocate would count, too.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        left_out, peak = alone.submit(unpacked_with_peak, packed.getvalue(), archive_of().getvalue(), tmp_path).result()
    assert (len(left_out), left_out[-1]) == (1001, "… and 19000 more")
    assert peak < len(packed.getbuffer()) / 2  # all members, kept, take more than the archive


def unpacked_with_peak(packed, empty, folder):
    """What was left out of an archive, and the most memory, in bytes, that unpacking it took."""
    tool_context._unpack_into(io.BytesIO(empty), folder)  # what is loaded once is no part of it
    archive = io.BytesIO(packed)
    tracemalloc.start()
    left_out = tool_context._unpack_into(archive, folder)
    return left_out, tracemalloc.get_traced_memory()[1]
