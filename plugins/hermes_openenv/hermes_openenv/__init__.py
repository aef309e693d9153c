"""hermes-rl environments for OpenEnv: a factory of resource sessions, with the trainer's model or with one of their
own."""

from hermes_openenv.sessions import HermesSession, HermesSessionFactory, HermesTrainableSession

__all__ = ["HermesSession", "HermesSessionFactory", "HermesTrainableSession"]
