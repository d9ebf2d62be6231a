"""`python -m rollstream` is the command line."""

from rollstream.cli import main

main()
