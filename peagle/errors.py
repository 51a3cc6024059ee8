"""The one exception a user may see.

Knows nothing about anything else. The command line turns it into one line and exit status 2;
a library user catches it as the ValueError it is. Everything else that escapes is a bug of ours.
"""


class UserError(ValueError):
    """Something the user gave us is wrong; the message is one line that names it and the fix."""


def first_line(error: Exception) -> str:
    """What somebody else's exception says, as part of a line of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
