"""Garbage collection during a test run.

Nothing changes for your test. pytest keeps every test until the end, and each full collection would go through all of
them: so the collector is off until all are collected, and spares them afterwards.
"""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
