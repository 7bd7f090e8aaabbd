"""`python -m memjax` is the program `memjax`."""

from memjax.cli.entry import main

if __name__ == "__main__":
    main()
