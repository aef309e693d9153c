"""hermes-rl environments for TRL: a dataset, an environment factory, a rollout function and a rollout worker."""

from hermes_trl.environment import RolloutEnvironment, environment_reward
from hermes_trl.spec import HermesSpec
from hermes_trl.worker import HermesRolloutWorker

__all__ = ["HermesRolloutWorker", "HermesSpec", "RolloutEnvironment", "environment_reward"]
