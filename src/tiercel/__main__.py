"""`python -m tiercel`: the command line, as `tiercel` is."""

from tiercel.cli.main import main

if __name__ == "__main__":
    main()
