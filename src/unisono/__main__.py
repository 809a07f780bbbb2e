"""`python -m unisono` is the command line."""

from unisono.front.cli.app import main

if __name__ == "__main__":
    main()
