"""How far a run is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from ...core.provenance import Provenance
from ...results import Result

if TYPE_CHECKING:
    from typing import Self

State: TypeAlias = Literal["running", "stopped", "finished"]


@dataclass(frozen=True, eq=False, repr=False)
class RunState(Result):
    """State of a run folder.

    Attributes:
        computing: Kind of the result the run computes.
        state: ``"running"``: a process works on it; ``"stopped"``: start the same call again for the rest.
        layers: All layers of the run.
        finished: Layers whose pieces are whole.
        damaged: (layer, reason) of pieces that will be made again.
        seconds_per_layer: Wall-clock time per finished layer of the latest stretch of work, None if unknown.
        seconds_left: The same times the layers left; 0 when finished, None if unknown.
        provenance: Of the result, with the time the run was started.

    Example:
        >>> from tl_headmaps import describe_run, load_default_model, relation_scores
        >>> heads = ["L22H8", "L23H4"]
        >>> scores = relation_scores(load_default_model(), "comparative", heads=heads, run_dir="run", progress=False)
        >>> run = describe_run("run")
        >>> run.computing, run.layers, run.finished, run.damaged
        ('relation_scores', (22, 23), (22, 23), ())
    """

    kind: ClassVar[str] = "run_state"
    computing: str
    state: State
    layers: tuple[int, ...]
    finished: tuple[int, ...]
    damaged: tuple[tuple[int, str], ...]
    seconds_per_layer: float | None
    seconds_left: float | None
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "computing": self.computing,
            "state": self.state,
            "axes": {"layer": list(self.layers)},
            "finished": list(self.finished),
            "damaged": [list(entry) for entry in self.damaged],
            "seconds_per_layer": self.seconds_per_layer,
            "seconds_left": self.seconds_left,
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(
            computing=values["computing"],
            state=values["state"],
            layers=tuple(values["axes"]["layer"]),
            finished=tuple(values["finished"]),
            damaged=tuple((layer, reason) for layer, reason in values["damaged"]),
            seconds_per_layer=values["seconds_per_layer"],
            seconds_left=values["seconds_left"],
            provenance=Provenance.from_dict(values["provenance"]),
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per layer."""
        reasons = dict(self.damaged)
        for layer in self.layers:
            state = "finished" if layer in self.finished else "damaged" if layer in reasons else "missing"
            yield {"layer": layer, "state": state, "reason": reasons.get(layer, "")}

    def __str__(self) -> str:
        from ...renderers.text import run_state_text

        return run_state_text(self)
