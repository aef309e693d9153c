"""What a rollout leaves behind: its record, the folder of a run, sequences of tokens, summaries."""
