"""The nano models: a trainer agent and students small enough for a laptop, and how they are made."""
