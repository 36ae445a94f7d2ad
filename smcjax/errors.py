"""Errors that users see. Bad input raises `ValueError`; what is wrong with a directory on disk has its own name."""


class CheckpointError(ValueError):
    """A model directory that cannot be used; the message is one sentence that names the file and the mend."""
