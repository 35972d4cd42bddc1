"""The public border: options that annotations allow, docstrings that are completed."""

import inspect
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import tl_headmaps
from tl_headmaps.core.errors import UsageError
from tl_headmaps.core.options import (
    SHARED_ARGS,
    Between,
    Count,
    Draws,
    Seed,
    Share,
    args_of,
    checked,
    public,
    with_shared_args,
)

Way = Literal["up", "down"]


@public
def asked(
    model: Any,
    way: Way = "up",
    n: Count | None = None,
    share: Share = 0.5,
    *,
    seed: Seed = 0,
    draws: Draws = 9,
    plain: bool = True,
    column: str = "text",
    mixed: int | str = 1,
    batch: Annotated[int, Between(2, 4)] = 2,
) -> dict[str, Any]:
    """What arrived.

    Args:
        way: Up
            or down.
        n, share: Both.

    Returns:
        The options.
    """
    return {name: value for name, value in locals().items() if name != "model"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"way": "left"}, "way='left' is not known. Choose one of: 'up', 'down'."),
        ({"way": None}, "way=None is not known. Choose one of: 'up', 'down'."),
        ({"n": 0}, "n=0 is impossible; it must be at least 1."),
        ({"n": "10"}, "n='10' is impossible; it must be a whole number, at least 1."),
        ({"n": 1.0}, "n=1.0 is impossible; it must be a whole number, at least 1."),
        ({"n": True}, "n=True is impossible; it must be a whole number, at least 1."),
        ({"n": np.bool_(True)}, "it must be a whole number, at least 1."),
        ({"n": -(10**5000)}, "n=a very large int is impossible; it must be at least 1."),
        ({"share": 1.5}, "share=1.5 is impossible; it must be from 0 to 1."),
        ({"share": float("nan")}, "share=nan is impossible; it must be from 0 to 1."),
        ({"share": "0.5"}, "share='0.5' is impossible; it must be a number, from 0 to 1."),
        ({"share": None}, "share=None is impossible; it must be a number, from 0 to 1."),
        ({"seed": -1}, "seed=-1 is impossible; it must be from 0 to 9,223,372,036,854,775,807."),
        ({"draws": 10**15}, "draws=1000000000000000 is impossible; it must be from 1 to 100,000."),
        ({"plain": "no"}, "plain='no' is impossible; it must be True or False."),
        ({"plain": torch.ones(2)}, "is impossible; it must be True or False."),
        ({"column": 3}, "column=3 is impossible; it must be a text."),
        ({"batch": 5}, "batch=5 is impossible; it must be from 2 to 4."),
    ],
)
def test_what_annotations_forbid_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked(None, **options)
    assert str(caught.value).endswith(sentence)


def test_what_they_allow_arrives() -> None:
    assert asked(None, "down", np.int64(3), np.float32(0.5), plain=np.bool_(False), mixed="any") == {
        **{"way": "down", "n": 3, "share": 0.5, "seed": 0, "draws": 9},
        **{"plain": False, "column": "text", "mixed": "any", "batch": 2},
    }
    assert type(asked(None, n=np.int64(3))["n"]) is int and asked(None, share=1)["share"] is not True
    assert checked("n", None, Count | None) is None and checked("n", "x", Any) == "x"


def test_python_refuses_options_that_are_not_there_by_the_name_of_the_call() -> None:
    with pytest.raises(TypeError, match=r"asked\(\) got an unexpected keyword argument 'wya'"):
        asked(None, wya="up")
    with pytest.raises(TypeError, match=r"asked\(\) missing 1 required positional argument"):
        asked()


def test_docstrings_are_completed_in_the_order_of_the_signature() -> None:
    lines = inspect.getdoc(asked).split("\n")
    assert lines[:7] == [
        *("What arrived.", "", "Args:", f"    model: {SHARED_ARGS['model']}", "    way: Up or down."),
        *("    n: Both.", "    share: Both."),
    ]
    assert lines[7:] == [
        *(f"    seed: {SHARED_ARGS['seed']}", f"    column: {SHARED_ARGS['column']}"),
        *("", "Returns:", "    The options."),
    ]
    assert with_shared_args("One line.", ["progress"]) == f"One line.\n\nArgs:\n    progress: {SHARED_ARGS['progress']}"
    assert with_shared_args(None, ["progress"]) is None and with_shared_args("Nothing.", ["other"]) == "Nothing."
    assert args_of(None, ["progress", "other"]) == {"progress": SHARED_ARGS["progress"]}


def test_annotations_of_every_call_can_be_resolved() -> None:
    """Checked when the call is made first: a name that is not there would come up only then."""
    calls = [getattr(tl_headmaps, name) for name in tl_headmaps.__all__]
    named = [call for call in calls if inspect.isfunction(call) and getattr(call, "is_public", False)]
    assert len(named) >= 20
    for call in named:
        assert inspect.get_annotations(inspect.unwrap(call), eval_str=True)
