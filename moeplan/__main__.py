"""Entry point: every error that the user can act on becomes one line and exit status 2."""

import sys

from moeplan.errors import MoeplanError


def main() -> None:
    """Run the command line. Exit status: 0 done, 2 the user can act, 3 done and the answer is no, 1 a bug."""
    from moeplan.cli import app

    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except MoeplanError as bad:
        sys.exit(_complain(str(bad)))
    except (RecursionError, MemoryError, OverflowError) as bad:
        sys.exit(_complain(f"input too large or too deeply nested: {type(bad).__name__}: {bad}"))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except Exception as bad:
        usage = getattr(bad, "format_message", None)  # click's usage errors; typer may carry its own copy of click
        if usage is None:
            raise
        sys.exit(_complain(usage()))


def _complain(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
