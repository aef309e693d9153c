"""The guest: our resident program inside a sandbox. It is sent through the channel, and needs only Python >= 3.7.

Of hermes_core it may import only `linux`. `guest_client.bundle` packs both into one payload. Inside the sandbox they
are the packages `hermes_guest.guest` and `hermes_guest.linux`.
"""
