"""The exception for user errors. The command line prints it as one line and exits with status 2."""


class UserError(ValueError):
    """Invalid input from the user. The message is one line that names the flag or field, the value and the fix."""


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, to include in another message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
