"""Running agent-written code: the sandbox, the program inside it, and its handle outside."""
