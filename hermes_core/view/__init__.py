"""Views of a run: tables and transcripts for a terminal, and logs for Inspect's viewer."""
