"""The outer loop: the trainer agent learns from its episodes, on tinker-cookbook's RL loop.

`service` is the Tinker service, `preflight` sees that it can be used, `start` and `warmstart` are
what the agent begins from. `plan` says which episodes a run has, `env` and `renderer` show them to
the cookbook, `handled` is what it does not learn from, `replay` records what is sampled so that a
killed run samples nothing twice, `loop` puts it together.
"""
