"""metatrainer: an agent, trained by reinforcement learning, that designs RL training jobs."""

__version__ = "0.1.0"
