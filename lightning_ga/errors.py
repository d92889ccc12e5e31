"""The one exception for a mistake that its message alone lets the user mend, and the one warning."""


class UserError(ValueError):
    """Bad input, said in one sentence: the value, the rule and the way out.

    The command line prints the message without a traceback and exits with code 1. Any other
    exception is a bug of the package and keeps its traceback.
    """


class RankError(UserError):
    """A ``UserError`` of one rank alone: the others only see that it is gone, so each says its own."""


class ExactnessWarning(UserWarning):
    """Training goes on, but not with the gradients of the whole batch, or not for the steps that were meant."""
