"""Looking at a run: an index of its rollouts, tables and transcripts for a terminal, and logs for Inspect's viewer."""
