"""Entry point of `python -m rollstream`."""

from rollstream.cli import entry_point

entry_point()
