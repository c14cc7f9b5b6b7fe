"""`python -m elude_steer` runs `elude-steer`."""

from elude_steer.cli.entry_point import main

if __name__ == "__main__":
    main()
