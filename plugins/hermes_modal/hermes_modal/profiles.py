"""Profiles from mappings, environment variables and YAML."""
