"""Linux calls and bounded output, shared by the guest, the local backend and the program on other hosts.

Python >= 3.7, standard library only. This package is sent to sandboxes and hosts, so nothing here may import from the
rest of hermes_core.
"""
