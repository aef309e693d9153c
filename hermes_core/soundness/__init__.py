"""Checks whether a dataset's items can be trusted, and whether recorded patches still get their rewards."""
