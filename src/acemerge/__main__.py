"""`python -m acemerge`."""

from acemerge.cli.app import main

main()
