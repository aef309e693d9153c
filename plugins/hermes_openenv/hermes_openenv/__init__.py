"""hermes-rl environments for OpenEnv: a factory of resource sessions. The trainer or our own agent runs the model."""

from hermes_openenv.sessions import HermesSession, HermesSessionFactory, HermesTrainableSession

__all__ = ["HermesSession", "HermesSessionFactory", "HermesTrainableSession"]
