"""What can go wrong, in a few classes. Every message says what was found, what was expected, and what to do."""

_LONGEST = 1200
"""Characters of a message. Whatever was found may be a file of a megabyte."""


def shown(value: object) -> str:
    """The beginning of a value, for a message; the kind of one that Python does not write out (thousands of digits).

    Example:
        >>> shown("L23"), shown(10**5000)
        ("'L23'", 'a very large int')
    """
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"


class HeadMapsError(Exception):
    """Anything this package refuses to do; the message is a sentence for the user.

    A very long one is cut in the middle: its beginning says what was found, its end what to do.

    Example:
        >>> from tl_headmaps import HeadIndex, HeadMapsError
        >>> try:
        ...     HeadIndex.parse("23.4")
        ... except HeadMapsError as error:
        ...     print(error)
        '23.4' is not the name of a head. Heads are written like 'L23H4': layer 23, head 4, both counted from 0.
    """

    def __init__(self, message: str = "") -> None:
        half = _LONGEST // 2
        super().__init__(message if len(message) <= _LONGEST else f"{message[:half]} ... {message[-half:]}")


class UsageError(HeadMapsError, ValueError):
    """The call itself is wrong: an unknown head, option or file type (command line: exit 2)."""


class TokenError(UsageError):
    """A word that is not exactly one token of the model's vocabulary."""


class RelationDataError(UsageError):
    """A relation that does not exist, cannot be read, or has no pair the model's tokenizer can write."""


class TaskDataError(UsageError):
    """Task items that cannot be read, are not labelled, or cannot be split fairly."""


class UnsupportedModelError(HeadMapsError, ValueError):
    """A model without the parts an analysis needs, or with weights that cannot be read."""


class WeightBasisError(HeadMapsError, ValueError):
    """The weights were processed in a way that the requested preset cannot undo."""


class ModelLoadError(HeadMapsError):
    """A model could not be found, fetched, verified or opened."""


class HeadMapsWarning(UserWarning):
    """What was assumed or left out, where that can be meant: commands print it as a sentence."""


class OutputError(HeadMapsError, OSError):
    """A result could not be written or read."""


class RunError(HeadMapsError, RuntimeError):
    """A worker died or failed; with a run folder, finished layers are saved."""
