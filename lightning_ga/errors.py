"""The one exception for a mistake that its message alone lets the user mend, and the one warning.

Tested in tests/test_public.py.
"""

import re

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # of terminals, and of the order of letters
NO_TEXT = re.compile(r"[\ud800-\udfff]")  # bytes of a file's name that are not UTF-8


def printable(text: object) -> str:
    r"""Return a text from anywhere in one line that changes nothing on a terminal.

    Examples:
        >>> printable("cat\x1b[2J")
        'cat\\x1b[2J'
    """
    return CONTROLS.sub(lambda sign: sign[0].encode("unicode_escape").decode(), NO_TEXT.sub("\ufffd", str(text)))


class UserError(ValueError):
    """Bad input, said in one sentence: the value, the rule and the remedy.

    The command line prints the message without a traceback and exits with code 1. Any other
    exception is a bug of the package and keeps its traceback.
    """


class RankError(UserError):
    """A ``UserError`` of one rank alone: other ranks only see that it is gone, so each rank prints its own error."""


class ExactnessWarning(UserWarning):
    """Training continues, but not with the gradient of the whole batch, or this could not be measured."""
