"""`python -m oktopk`: the command, where no script is on the path."""

from oktopk.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
