"""The one error that a user can fix."""


class SettingError(ValueError):
    """A setting, a file or a grid of ranks that cannot work.

    The message names the value, what is allowed and what to change. ``launch`` prints it as one
    line and ends the run with a non-zero status; any other exception is a bug and keeps its
    traceback.
    """

    def __init__(self, message):
        # A DataLoader's worker sends the text of its traceback: the message is the end of it.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].rstrip())
