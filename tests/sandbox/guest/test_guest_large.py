"""Results of many megabytes: right to the byte, and without keeping the driver's event loop from running."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile

import pytest

SIZE = 160_000_000


@pytest.mark.full
@pytest.mark.loop_stall(0.2)  # to put the pieces together is one copy of it
async def test_a_large_tree_in_one_piece_does_not_stall_the_loop(rigged, loop_lag):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        # Each 1,000 bytes hold their number, so that a piece lost, doubled or moved is seen.
        made = await slot.run(f"mkdir t && seq -f '%0999.0f' {SIZE // 1000} >t/f && sha256sum <t/f", timeout_s=120)
        digest = await asyncio.to_thread(digest_in, await slot.tar_out("t", max_bytes=2 * SIZE))
    assert digest == made.text.split()[0]


def digest_in(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return hashlib.file_digest(tar.extractfile("f"), "sha256").hexdigest()
