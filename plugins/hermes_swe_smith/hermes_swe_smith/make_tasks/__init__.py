"""`hermes-rl make-tasks`: SWE-smith tasks from any Python repository with pytest tests."""
