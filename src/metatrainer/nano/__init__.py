"""The nano models: an agent and students small enough for a laptop, and how they are made."""
