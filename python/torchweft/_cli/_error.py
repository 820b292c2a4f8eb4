"""Errors of commands."""


class CommandError(Exception):
    """Printed instead of a traceback."""
