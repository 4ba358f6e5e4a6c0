"""The few exceptions of metatrainer. Each message says what was found and what to do next.

Knows nothing about who raises or catches them.
"""


class MetatrainerError(Exception):
    """Base of all errors that a user can act on."""


class ConfigError(MetatrainerError):
    """A setting is wrong. The command line prints the message and exits with 2."""


class SandboxUnavailable(MetatrainerError):
    """No sandbox can be had here. The message says what to install; exits with 2."""


class LedgerError(MetatrainerError):
    """The ledger of a run cannot be used: missing, of another version, in use, or contradicted."""


class EnvError(MetatrainerError):
    """Agent-written environment code failed inside the sandbox.

    kind: import, load, reward, timeout, memory, crash, output or protocol.
    file, line: place in the submitted folder, where known.
    """

    def __init__(self, kind: str, message: str, file: str | None = None, line: int | None = None):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.file = file
        self.line = line


class JobError(MetatrainerError):
    """A training job ended without a usable student.

    outcome: the word that goes into the ledger (crashed, timeout, env_error, diverged, ...).
    """

    def __init__(self, outcome: str, message: str):
        super().__init__(message)
        self.outcome = outcome
        self.message = message


class WorkspaceError(MetatrainerError):
    """A tool call of the agent is refused. The message is the tool's answer to the agent."""


class AgentError(MetatrainerError):
    """The agent itself failed, not its job: its server does not answer, or answers nonsense. The
    episode has no reward then."""


class ContextFull(MetatrainerError):
    """An episode's conversation does not fit into its agent's model any more. Ends the episode."""


class PoolError(MetatrainerError):
    """The pool itself is broken (not a job in it): no worker starts, or none can be reached."""


class BudgetError(MetatrainerError):
    """The run may not spend what is asked for. Raise the cap and resume it."""


class WorkerFault(MetatrainerError):
    """A worker process did not answer a request as it should. Stays inside the pool.

    kind: timeout, crashed or lost, the outcome of the job that was asked for.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message
