"""A submitted training job: its settings, what can be wrong with it, and how that is found."""
