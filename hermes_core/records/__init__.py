"""The stored results of rollouts: records, the folder of a run, sequences of tokens, summaries."""
