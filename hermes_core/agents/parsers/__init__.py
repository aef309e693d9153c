"""Parsers for tool calls that models write as text: one for each format, by name in `runtime.parsers`."""
