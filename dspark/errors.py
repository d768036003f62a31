"""What this package raises. Every message says what was found and what cures it, and is meant for the user."""


class DsparkError(ValueError):
    """Something that was asked for cannot be done, or something given cannot be used."""
