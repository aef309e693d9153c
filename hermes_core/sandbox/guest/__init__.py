"""The guest: our resident program inside a sandbox. Python >= 3.7, standard library only; sent through the channel.

Nothing here may import from the rest of hermes_core: `hermes_core.sandbox.guest_client.bundle` packs these modules into
one payload, and inside the sandbox they are the package `hermes_guest`.
"""
