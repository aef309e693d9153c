"""hermes-rl environments for Tinker: groups of token-exact rollouts, a GRPO loop, and environments for its cookbook."""

from hermes_tinker.grpo import Step, advantages, datums, grpo
from hermes_tinker.run import TinkerRun

__all__ = ["Step", "TinkerRun", "advantages", "datums", "grpo"]
