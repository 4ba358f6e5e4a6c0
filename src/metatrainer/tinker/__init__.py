"""The Tinker client protocol over the embedded engine, in this process.

`client` and `rest` have the clients, `worker` the thread that owns an engine, `checkpoints` the
files, `seam` the one place where tinker-cookbook is handed a service of ours. Knows nothing about
agents, episodes or rewards.
"""
