"""`python -m acemerge`."""

from acemerge.cli import main

main()
