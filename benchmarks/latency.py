"""How long `true` takes in a slot, through the tool backend, beside `bash -c true` as an asyncio subprocess."""

from __future__ import annotations

from functools import partial

from benchmarks.host import LEVELS, NOT_GRANTED, local_backend, shell
from benchmarks.measure import Row, Rows, Target, alternate, bare, p50, percentile, timed

TARGET = Target(2.0, of_reference=True)


async def rows(quick: bool) -> Rows:
    """p50 at each isolation level; p95 in the notes."""
    rounds = 40 if quick else 400
    uncaptured = timed(partial(bare, "bash", "-c", "true", captured=False))
    for level in LEVELS:
        case = f"p50 of `true`, {level}"
        async with local_backend(level, 1) as backend:
            if backend is None:
                yield Row("latency", case, None, None, "ms", TARGET, (NOT_GRANTED,))
                continue
            async with backend.lease() as slot:
                ours, reference = await alternate(
                    timed(partial(shell, backend, slot, "true")),
                    timed(partial(bare, "bash", "-c", "true")),
                    rounds,
                    warm_up=10,
                )
                silent = [await uncaptured() for _ in range(rounds)]
                granted = slot.isolation
        yield Row(
            "latency",
            case,
            p50(ours) * 1e3,
            p50(reference) * 1e3,
            "ms",
            TARGET,
            (
                f"p95: ours {percentile(ours, 0.95) * 1e3:.2f}, reference {percentile(reference, 0.95) * 1e3:.2f} ms",
                f"reference without capturing its output: p50 {p50(silent) * 1e3:.2f} ms",
                *([f"granted: {granted}"] if granted != level else []),
            ),
        )
