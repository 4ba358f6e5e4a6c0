"""The outer loop: the trainer agent learns from its episodes, on tinker-cookbook's RL loop.

`plan` says which episodes a run has, `env` and `renderer` show them to the cookbook, `replay`
records what is sampled so that a killed run samples nothing twice, `loop` puts it together.
"""
