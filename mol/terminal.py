"""Tables on a terminal, or whole where the output is none."""

import sys

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The command ends as any other whose reader has enough, not with rich's exit code 1."""
        raise BrokenPipeError


def console(width: int = 200) -> Console:
    """A console on stdout, of this width where that is no terminal: a pipe or a file has none, and
    80 columns would cut the figures."""
    return _Console(file=sys.stdout, width=None if sys.stdout.isatty() else width)
