"""Entry point of `python -m rollstream`."""

from rollstream.cli import main

main()
