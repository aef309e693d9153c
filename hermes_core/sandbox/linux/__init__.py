"""What the guest, the local backend and the program on other hosts share: Linux calls, and bounded output.

Python >= 3.7, standard library only. It is sent to sandboxes and hosts, so nothing here may import from the rest of
hermes_core.
"""
