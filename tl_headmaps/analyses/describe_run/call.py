"""How far a run in a run folder is, and how long the rest will take."""

from pathlib import Path

from ...core.provenance import Provenance
from ...core.runs import DamagedPieceError, RunFolder, RunRecord, layer_piece
from .result import RunState

_GAP = 3.0
"""A pause longer than this many times the longest layer ends a stretch of work: the run had been stopped."""


def describe_run(run_dir: str | Path) -> RunState:
    """State of a run: which layers are finished, missing or damaged, and the time left.

    Args:
        run_dir: The folder given as ``run_dir=`` (``--run-dir``).

    Example:
        >>> from tl_headmaps import describe_run, load_default_model, relation_scores
        >>> model = load_default_model()
        >>> scores = relation_scores(model, "country_to_capital", heads="L23H4", run_dir="run", progress=False)
        >>> describe_run("run").state
        'finished'
    """
    folder = Path(run_dir)
    run = RunFolder(folder, RunRecord.read(folder))
    finished, damaged = [], []
    for layer in run.record.layers:
        try:
            if run.load(layer_piece(layer)) is not None:
                finished.append(layer)
        except DamagedPieceError as error:
            damaged.append((layer, str(error)))
    left = len(run.record.layers) - len(finished)
    per_layer = _seconds_per_layer(run.times())
    return RunState(
        computing=str(run.record.identity.get("kind")),
        state="finished" if not left else "running" if run.is_running() else "stopped",
        layers=run.record.layers,
        finished=tuple(finished),
        damaged=tuple(damaged),
        seconds_per_layer=per_layer,
        seconds_left=0.0 if not left else None if per_layer is None else per_layer * left,
        provenance=Provenance.from_dict(run.record.provenance),
    )


def _seconds_per_layer(times: list[tuple[float, float]]) -> float | None:
    """Wall-clock seconds per layer of the latest stretch: with several workers less than a layer takes."""
    if not times:
        return None
    times = sorted(times, key=lambda span: span[1])
    longest = max(finished - started for started, finished in times)
    first = len(times) - 1
    while first and times[first][0] - times[first - 1][1] <= _GAP * longest:
        first -= 1
    stretch = times[first:]
    return (stretch[-1][1] - min(started for started, _ in stretch)) / len(stretch)
