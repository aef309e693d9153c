"""Runs of many rollouts: options, sessions, groups, trainers."""
