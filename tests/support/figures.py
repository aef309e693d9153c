"""Figures that tests measure are printed at the end of a run: `record_property("figure", "how many of what")`."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    for name, value in (each for report in reports for each in report.user_properties):
        if name == "figure":
            terminalreporter.write_line(str(value))
