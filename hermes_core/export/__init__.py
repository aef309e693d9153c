"""Turns the records of a run into datasets for training and into the formats of other tools, and joins runs."""
