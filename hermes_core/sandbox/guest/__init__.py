"""The guest: our resident program inside a sandbox. Python >= 3.7, standard library only; sent through the channel.

Nothing here may import from the rest of hermes_core but `linux`. `guest_client.bundle` packs both into one
payload; inside the sandbox they are the packages `hermes_guest.guest` and `hermes_guest.linux`.
"""
