"""The environment `endless-terminals`: generated tasks, each with a container definition and two files of tests."""
