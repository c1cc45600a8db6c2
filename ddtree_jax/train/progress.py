"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 15.0


class ProgressLine:
    """Shows how far something is; use as a context.

    Args:
      title: what is under way.
      total: units of work.
      quiet: show nothing.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False):
        self._title, self._total, self._done = title, total, 0
        self._text, self._quiet, self._last = "", quiet, 0.0
        self._bar = None
        if not quiet and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True))
            self._task = self._bar.add_task(title, total=total, text="")

    def __enter__(self) -> "ProgressLine":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()
        elif self._done:
            self._print()

    def update(self, done: int, text: str = "", *, total: int | None = None) -> None:
        """`done` units are finished; `text` follows the bar."""
        self._done, self._text, self._total = done, text, total or self._total
        if self._bar:
            self._bar.update(self._task, completed=done, total=self._total, text=text)
        elif time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._print()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def _print(self) -> None:
        self._last = time.monotonic()
        if not self._quiet:
            print(f"{self._title}: {self._done}/{self._total} {self._text}", file=sys.stderr, flush=True)
