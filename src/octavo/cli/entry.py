"""What the installed command starts: so little that Ctrl-C is answered from the first moment on, then `main`."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def entry() -> None:
    """Run the command line of this process and end it with its exit code."""
    try:
        from octavo.cli.main import main

        main()
    except KeyboardInterrupt:  # while the program itself was being loaded
        sys.exit(EXIT_INTERRUPTED)
