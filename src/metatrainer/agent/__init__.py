"""What the trainer agent sees and does: tasks, instructions, workspace, tools, policies."""
