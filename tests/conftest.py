"""The pytest plugins that every test has. Each says in its docstring what it does; ours are in `tests/support`."""

pytest_plugins = [
    "tests.support.collector",
    "tests.support.environment",
    "tests.support.selection",
    "tests.support.order",
    "tests.support.figures",
    "tests.support.requirements",
    "tests.support.namespaces",
    "tests.support.record_schema",
    "tests.support.loop_lag",
    "tests.support.leak_check",
    "tests.support.chat_tokenizers",
    "tests.support.guest_sources",
    "tests.support.places",
    "hermes_testing.conformance.plugin",
]
