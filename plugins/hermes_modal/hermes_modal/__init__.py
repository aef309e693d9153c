"""The Modal backend for hermes-rl: sandboxes in the cloud with many slots in each, over one exec of the SDK's."""
