"""The errors lpnet raises: what is wrong, the numbers, the remedy. No communication."""

from __future__ import annotations

EXIT_STOPPED = 75
"""Exit code of what stopped early, as it was asked to, and can go on."""


class LpnetError(Exception):
    """A failure with a message for the user; the command line ends with `exit_code`."""

    exit_code = 1


class UsageError(LpnetError):
    """The user asked for something that cannot be done; the message says what would work."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is wrong."""


class DataError(UsageError):
    """A data file is missing, malformed or out of range."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, or belongs to another network or schema."""


class SaveError(LpnetError):
    """A checkpoint could not be written; the one before it is intact."""


class NumericsError(LpnetError):
    """A loss, state or gradient is not finite."""
