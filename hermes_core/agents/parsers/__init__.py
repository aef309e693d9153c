"""Tool calls that models write as text: one parser for each format, by name in `runtime.parsers`."""
