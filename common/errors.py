"""The one error that a user can mend."""


class SettingError(ValueError):
    """A setting, a file or a grid that cannot work.

    The message names the value, what is allowed and what to change. ``launch`` prints it as one
    line and ends the run with a non-zero status; any other exception is a bug and keeps its
    traceback.
    """
