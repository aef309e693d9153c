"""Every hermes-rl environment as an environment of verifiers. `hermes_rl` is the module that verifiers loads."""
