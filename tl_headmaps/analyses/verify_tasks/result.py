"""Whether a model gets worse at a function when that function's heads are taken away, and only then."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.provenance import Provenance
from ...renderers.figure import Figure
from ...results import Result

if TYPE_CHECKING:
    from typing import Self

_MATRICES = ("accuracy", "accuracy_low", "accuracy_high")
_BY_FUNCTION = (
    "clean",
    "clean_low",
    "clean_high",
    "random",
    "random_low",
    "random_high",
    "chance",
    "p_value",
    "q_value",
)
SIGNIFICANT = 0.05
"""False discovery rate below which own heads differ from random ones."""


@dataclass(frozen=True, eq=False, repr=False)
class TaskVerification(Result):
    """Accuracy on the items of a function (columns) after ablating the heads of a function (rows).

    An item counts as right when the model finds the right answer likelier than every alternative. Its heads were chosen
    without it: by a probe that did not see its content. Intervals are 95% Wilson intervals over items.

    Attributes:
        functions: Names of the functions, for both axes.
        n_items: Items of each function that were asked.
        n_ablated: Heads taken away for each function.
        accuracy: After ablating the heads of the row's function, on the items of the column's.
        accuracy_low, accuracy_high: Its interval.
        clean: With all heads.
        clean_low, clean_high: Its interval.
        random: With as many other heads taken away, drawn at random from those that are not the function's own, on
            the function's own items; mean over several draws.
        random_low, random_high: Its interval.
        chance: Expected share of right answers when one of the alternatives is drawn.
        p_value: How likely own and random heads would differ so much on the function's own items if it did not matter
            which are taken away: exact, paired by items, two-sided (McNemar's test for a single random draw).
        q_value: The same after Benjamini-Hochberg over the functions.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", "", ("0",), "", str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"No {n} is red.", ("wet",), "", str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups))
        >>> maps = task_maps(load_default_model(), tasks, folds=3, n_null=1, cache_dir="cache", progress=False)
        >>> found = maps.verify(n_items=5, n_random=1, max_heads=2, progress=False)
        >>> found.functions, found.n_items, found.chance.tolist()
        (('retrieval', 'math_calculation'), (5, 5), [0.5, 0.5])
        >>> float(found.clean[0]), tuple(found.accuracy.shape)
        (1.0, (2, 2))
    """

    kind: ClassVar[str] = "task_verification"
    methods: ClassVar[tuple[str, ...]] = ("ma2025cognitive", "wilson1927probable")
    functions: tuple[str, ...]
    n_items: tuple[int, ...]
    n_ablated: tuple[int, ...]
    accuracy: Float[Tensor, "function function"]
    accuracy_low: Float[Tensor, "function function"]
    accuracy_high: Float[Tensor, "function function"]
    clean: Float[Tensor, " function"]
    clean_low: Float[Tensor, " function"]
    clean_high: Float[Tensor, " function"]
    random: Float[Tensor, " function"]
    random_low: Float[Tensor, " function"]
    random_high: Float[Tensor, " function"]
    chance: Float[Tensor, " function"]
    p_value: Float[Tensor, " function"]
    q_value: Float[Tensor, " function"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "function function"]:
        """The accuracies after ablation."""
        return self.accuracy

    @property
    def own(self) -> Float[Tensor, " function"]:
        """Accuracy on each function's items without its own heads."""
        return self.accuracy.diagonal()

    @property
    def others(self) -> Float[Tensor, " function"]:
        """Accuracy on each function's items without the heads of another function, mean over those."""
        return (self.accuracy.sum(0) - self.own) / (len(self.functions) - 1)

    @property
    def testable(self) -> tuple[bool, ...]:
        """Whether the whole model answers a function's items better than chance; else there is nothing to lose."""
        return tuple((self.clean_low > self.chance).tolist())

    @property
    def verdicts(self) -> tuple[str, ...]:
        """For each function: ``not testable``, ``worse``, ``better`` or ``no difference`` without its own heads.

        Compared with random others, at a false discovery rate of 5%.
        """

        def verdict(number: int) -> str:
            if not self.testable[number]:
                return "not testable"
            if self.q_value[number] >= SIGNIFICANT:
                return "no difference"
            return "worse" if self.own[number] < self.random[number] else "better"

        return tuple(verdict(number) for number in range(len(self.functions)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        axes = {"ablated": list(self.functions), "tested": list(self.functions)}
        result: dict[str, Any] = {"kind": self.kind, "axes": axes}
        result |= {"n_items": list(self.n_items), "n_ablated": list(self.n_ablated)}
        result |= {name: getattr(self, name).tolist() for name in (*_MATRICES, *_BY_FUNCTION)}
        result |= {"testable": list(self.testable), "verdicts": list(self.verdicts)}
        result["provenance"] = self.provenance.to_dict()
        return result

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        tensors: dict[str, Any] = {
            name: torch.tensor(values[name], dtype=torch.float32) for name in (*_MATRICES, *_BY_FUNCTION)
        }
        return cls(
            functions=tuple(values["axes"]["tested"]),
            n_items=tuple(values["n_items"]),
            n_ablated=tuple(values["n_ablated"]),
            provenance=Provenance.from_dict(values["provenance"]),
            **tensors,
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per pair of functions."""
        for row, ablated in enumerate(self.functions):
            for column, tested in enumerate(self.functions):
                record: dict[str, Any] = {"ablated": ablated, "tested": tested, "n_ablated": self.n_ablated[row]}
                record |= {name: float(getattr(self, name)[row, column]) for name in _MATRICES}
                record |= {name: float(getattr(self, name)[column]) for name in _BY_FUNCTION}
                yield record | {"n_items": self.n_items[column], "verdict": self.verdicts[column]}

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import task_verification_figure

        return task_verification_figure(self, **options)

    def __str__(self) -> str:
        from ..task_maps.text import task_verification_text

        return task_verification_text(self)
