"""`python -m peagle`."""

from peagle.cli import main

if __name__ == "__main__":  # a spawned engine process imports this file, too
    main()
