"""What the SWE-smith tests share."""

import pytest
from hermes_swe_smith import demo_tasks


@pytest.fixture(scope="session")
def swe_dataset(tmp_path_factory):
    """A folder with the demo's dataset: tasks.jsonl, repos.json and the bundle."""
    folder = tmp_path_factory.mktemp("dataset")
    demo_tasks.write(folder)
    return folder
