"""Entry point: turns MoeplanError into one line and exit status 2."""

import sys

from moeplan.errors import MoeplanError


def main() -> None:
    """Run the command line. Exit status: 0 done, 2 the user can act, 3 done and the answer is no, 1 a bug."""
    from moeplan.cli import app

    try:
        app()
    except MoeplanError as bad:
        sys.exit(_complain(bad))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def _complain(bad: MoeplanError) -> int:
    print("error: " + " ".join(str(bad).split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
