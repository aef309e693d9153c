"""A local Modal emulator: the real SDK, real commands, no account and no network. For users' own tests as well."""

from hermes_modal_emulator.emulator import EmulatorError, ModalEmulator

__all__ = ["EmulatorError", "ModalEmulator"]
