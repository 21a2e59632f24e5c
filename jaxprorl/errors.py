"""Errors that a user can act on: the message names the place (file and line, or config field), the value and the remedy.

Commands print them as one line and exit with status 2; anything else is a fault of this package and keeps its traceback.
"""


class UserError(Exception):
    """Base of all of them."""


class ConfigError(UserError, ValueError):
    """A config that cannot run."""


class DataError(UserError, ValueError):
    """The data, a tokenizer folder or a task cannot be used as asked."""


class ModelError(UserError, ValueError):
    """A model folder that cannot be used."""


class RewardError(UserError, ValueError):
    """A reward that cannot be loaded."""


class GraderError(UserError, RuntimeError):
    """The graders do not work, or too many samples of a step could not be graded."""


class NonFiniteError(UserError, RuntimeError):
    """Training has come to numbers that are not finite."""


class ResetError(UserError, TypeError):
    """An optimizer state of which it is unknown what a reset should reset."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, or read back."""


class StorageError(UserError, RuntimeError):
    """A file of a run, other than a checkpoint, that cannot be written."""


class RunLockedError(UserError, RuntimeError):
    """Another process works in the run's folder."""


class SharedMemoryError(UserError, RuntimeError):
    """Shared memory that cannot be had, or that does not hold what it should."""


class RingFullError(SharedMemoryError):
    """The other process took no record in time."""


class RecordError(SharedMemoryError, ValueError):
    """Bytes that are no record of this version."""


class EngineError(UserError, RuntimeError):
    """The rollout engine does not work: workers that cannot start, die again and again, or do not compute what the trainer does."""
