"""Errors that a user can act on: the message names the place (file and line, or config field), the value and the remedy."""


class DataError(ValueError):
    """The data, a tokenizer folder or a task cannot be used as asked."""
