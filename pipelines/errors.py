"""Faults that the person at the keyboard can mend."""


class UserError(ValueError):
    """A user's mistake: the message says what was found, what was expected, and which option or command cures it.

    The command line prints the message alone and exits with code 2.
    """
