"""Progress bars of long work, on terminals and in notebooks, and an estimate where it takes more than a minute."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from typing import Self

_Item = TypeVar("_Item")

_LONG = 60.0
"""Seconds from which an estimate is worth a line."""
_MEASURED = 2.0
"""Seconds of work, after the first step, from which the rest is estimated."""


class Progress:
    """A bar, and a line on stderr that says how long the work will take as soon as it can be estimated.

    A log has no bar, so that the line is all it shows; nothing is shown with ``show=False``.

    Example:
        >>> with Progress(total=2, desc="layers", show=False) as bar:
        ...     bar.update()
    """

    def __init__(self, *, total: int | None, desc: str, unit: str = "it", show: bool, initial: int = 0) -> None:
        self._what, self._done, self._left = desc, 0, (total or 0) - initial
        self._told = not show or not total
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None
        # None: on terminals and in notebooks.
        self._bar = tqdm(total=total, desc=desc, unit=unit, initial=initial, disable=None if show else True)

    def update(self, n: int = 1) -> None:
        """Advance the bar."""
        self._bar.update(n)
        self._done += n
        if self._told:
            return
        now = time.monotonic()
        if self._first is None:
            # The first step warms up, and may take many times as long as the others.
            self._first = (now, self._done)
            return
        spent, done = now - self._first[0], self._done - self._first[1]
        if done and spent >= _MEASURED:
            self._told = True
            whole = now - self._started + spent / done * (self._left - self._done)
            if whole >= _LONG:
                tqdm.write(f"{self._what}: this takes about {duration(whole)}", file=sys.stderr)

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each counted when the next one is asked for."""
        with self:
            for item in items:
                yield item
                self.update()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()


def duration(seconds: float) -> str:
    """A time that is not known exactly.

    Example:
        >>> duration(85.0), duration(400.0), duration(9000.0)
        ('1 minute', '7 minutes', '2.5 hours')
    """
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    return f"{seconds / 3600:.1f} hours"
