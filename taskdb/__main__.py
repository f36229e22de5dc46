"""`python -m taskdb`: the command line."""

from taskdb.cli.main import main

if __name__ == "__main__":
    main()
