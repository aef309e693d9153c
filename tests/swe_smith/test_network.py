"""What of git's and pip's failures is the network's, which is tried again, and what is the row's."""

import pytest
from hermes_swe_smith.network import git_was_cut_off, pip_was_cut_off

RETRY = "WARNING: Retrying (Retry(total={}, connect=None)) after connection broken by '{}(...)': /simple/pytest/\n"
NONE = "ERROR: Could not find a version that satisfies the requirement pytest==9 (from versions: none)\n"
SOME = "ERROR: Could not find a version that satisfies the requirement pytest==9 (from versions: 7.0, 8.0)\n"


@pytest.mark.parametrize(
    ("said", "cut_off"),
    [
        ("fatal: unable to access 'https://h/o/n/': Could not resolve host: h", True),
        ("fatal: unable to access 'http://h/o/n/': Failed to connect to h port 80 after 0 ms: Couldn't connect", True),
        ("ssh: connect to host h port 22: Connection timed out\nfatal: Could not read from remote repository.", True),
        ("fatal: repository 'https://h/o/n/' not found", False),
        ("fatal: could not read Username for 'https://h': terminal prompts disabled", False),
        ("fatal: couldn't find remote ref 0123", False),
        ("fatal: unable to access 'https://h/o/n/': The requested URL returned error: 403", False),
    ],
)
def test_failures_of_gits_network_are_told_apart(said, cut_off):
    assert git_was_cut_off(said) == cut_off


@pytest.mark.parametrize(
    ("said", "cut_off"),
    [
        (RETRY.format(1, "NewConnectionError") + RETRY.format(0, "NewConnectionError") + NONE, True),
        (RETRY.format(0, "NameResolutionError") + NONE, True),
        (RETRY.format(0, "ReadTimeoutError") + NONE, True),
        (RETRY.format(3, "NewConnectionError") + NONE, False),  # a retry was answered
        (RETRY.format(0, "NewConnectionError") + SOME, False),  # the index was reached in the end
        (RETRY.format(0, "SSLError") + NONE, False),
        (NONE, False),
        (SOME, False),
    ],
)
def test_failures_of_pips_network_are_told_apart(said, cut_off):
    assert pip_was_cut_off(said) == cut_off
