"""The inner loop: reinforcement learning of a student on an agent's environment."""
