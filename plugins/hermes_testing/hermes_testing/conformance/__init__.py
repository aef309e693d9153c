"""The conformance kit for backends: tests that every backend must pass. `hermes-rl conformance NAME` runs it.

A check is a coroutine function that takes a `Kit`. pytest runs the checks, with the plugin
`hermes_testing.conformance.plugin`.
"""

GROUPS = {
    "contract": ("contract",),
    "commands": ("commands",),
    "processes": ("processes",),
    "files": ("files",),
    "slots": ("slots", "apart"),
    "forwards": ("forwards",),
    "pools": ("pools",),
    "failure": ("failure", "transport"),
    "leaks": ("leaks",),
    "speed": ("speed",),
}
"""The groups of checks in the order in which they run, each with its modules of this package."""
