"""`python -m peagle`."""

from peagle.cli import main

main()
