"""`python -m metatrainer`: the command line."""

from metatrainer.cli import main

main()
