"""Generators of worlds and questions, one self-contained module a family.

Each has `sample(rng, level, names) -> dict` with prompt, world, answer and calls (the tool calls
of a perfect student, in order). They use the standard library alone, because a copy of each is
the starter that an agent finds in its workspace.
"""
