"""Work on many layers: in this process, in a pool, or on a cluster.

Finished layers are saved, so an interrupted run resumes.

An analysis describes its work on one layer as a :class:`LayerTask`; :func:`sweep_layers` does the rest. Scheduling is
left to any :class:`concurrent.futures.Executor` (threads, processes, Dask, MPI, Slurm)::

    @dataclass(frozen=True)
    class _Norms:
        weights: HeadWeights

        def prepare(self) -> LayerStep:
            return lambda layer: {"norm": self.weights.layer(layer).W_O.flatten(1).norm(dim=1)}

    swept = sweep_layers(_Norms(weights), range(weights.n_layers), kind="norms", provenance=weights.provenance(), ...)
    swept.layers[3]["norm"]

Workers are sent the name of the checkpoint and open it themselves; they return a packed layer of small tensors.
"""

import hashlib
import json
import pickle
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from tqdm.auto import tqdm

from ..capture.weights import HeadWeights
from ..core.errors import HeadMapsError, ModelLoadError, RunError, UsageError
from ..core.progress import Progress
from ..core.provenance import Provenance, package_versions
from ..core.store import DamagedPieceError, identity_of, layer_piece, open_run, pack, unpack

LayerStep: TypeAlias = Callable[[int], Mapping[str, Tensor]]
"""The work on one layer; returns small named tensors."""


@runtime_checkable
class LayerTask(Protocol):
    """The work of a sweep; small and picklable if another process is to do it.

    Attributes:
        weights: The model; sent as the name of its checkpoint.
    """

    @property
    def weights(self) -> HeadWeights: ...

    def prepare(self) -> LayerStep:
        """Build what all layers share, once per process."""


@dataclass(frozen=True)
class SweptLayers:
    """The layers of a finished sweep, and its provenance (with a run folder, ``created`` is when the run started)."""

    layers: dict[int, Mapping[str, Tensor]]
    provenance: Provenance

    def filled(self, values: Tensor, name: str, heads: Mapping[int, Sequence[int]] | None = None) -> Tensor:
        """An array [..., layer] with what the layers have under a name; with heads by layer, [..., layer, head]."""
        for layer, tensors in self.layers.items():
            if name in tensors:
                values[(..., layer) if heads is None else (..., layer, heads[layer])] = tensors[name].cpu()
        return values


def sweep_layers(
    task: LayerTask,
    layers: Sequence[int],
    *,
    kind: str,
    provenance: Provenance,
    details: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    description: str = "",
    progress: bool = True,
) -> SweptLayers:
    """Do a task on each of many layers.

    Args:
        task: The work.
        layers: The layers.
        kind: What is computed, the ``kind`` of the result.
        provenance: Provenance of the result; its options and data decide whether a run folder is of the same run.
        details: Whatever else decides the numbers and is not in the provenance.
        run_dir: Finished layers are saved in this folder, so an interrupted run resumes.
        executor: Where to compute: anything with the interface of ``concurrent.futures.Executor``.
        description: Text of the progress bar.
        progress: Show a progress bar on a terminal, and say how many layers were done before.
    """
    details = {**(details or {}), "layers": list(layers), "numbers": task.weights.numbers_digest}
    identity = identity_of(kind, provenance, details)
    with open_run(run_dir, identity, provenance, layers) as store:
        kept = {layer: store.finished(layer_piece(layer)) for layer in layers}
        done: dict[int, Mapping[str, Tensor]] = {layer: piece for layer, piece in kept.items() if piece is not None}
        if done and progress:
            tqdm.write(f"{len(done)} of {len(layers)} layers were done before.", file=sys.stderr)
        left = [layer for layer in layers if layer not in done]
        bar = Progress(total=len(layers), initial=len(done), desc=description, unit="layer", show=progress)
        work = _in_process(task, left) if executor is None else _in_executor(task, left, executor, identity)
        with bar, closing(work):
            for layer, tensors in work:
                done[layer] = tensors
                store.write(layer_piece(layer), tensors)
                bar.update()
    return SweptLayers(done, replace(provenance, created=store.created))


def ids_digest(*ids: Tensor) -> str:
    """SHA-256 of token ids: another tokenizer gives the same words other ids, and no fingerprint covers it."""
    return hashlib.sha256(json.dumps([part.tolist() for part in ids]).encode()).hexdigest()


Work: TypeAlias = Generator[tuple[int, Mapping[str, Tensor]], None, None]
"""Layers and their tensors, as they are finished."""


def _in_process(task: LayerTask, layers: Sequence[int]) -> Work:
    if not layers:
        return
    step = task.prepare()
    for layer in layers:
        yield layer, step(layer)


def _in_executor(task: LayerTask, layers: Sequence[int], executor: Any, identity: dict[str, Any]) -> Work:
    """Layers as they finish; after a failure, those already running are still waited for and yielded."""
    if isinstance(executor, type) or not callable(getattr(executor, "submit", None)):
        raise UsageError(
            f"executor= is a {type(executor).__name__}, which has no submit(). Pass any concurrent.futures.Executor: a "
            "ProcessPoolExecutor, client.get_executor() of Dask, an MPIPoolExecutor, ..."
        )
    if not layers:
        return
    in_threads = isinstance(executor, ThreadPoolExecutor)
    call = _in_threads(task, identity) if in_threads else _Shipped.of(task, layers, identity)
    futures = {executor.submit(call, layer): layer for layer in layers}
    standard = all(isinstance(future, Future) for future in futures)
    failure: tuple[int, BaseException] | None = None
    try:
        # Futures of another family (submitit) know result() as well, but cannot be waited for together.
        for future in as_completed(futures) if standard else list(futures):
            if failure is not None and future.cancelled():
                continue
            try:
                data = future.result()
            except Exception as error:
                if failure is None:
                    failure = (futures[future], error)
                    _cancel(futures)
                continue
            yield futures[future], _received(data, futures[future], identity)
    finally:
        _cancel(futures)
    if failure is not None:
        layer, reason = failure
        if isinstance(reason, HeadMapsError):
            raise reason
        raise RunError(
            f"A worker could not compute layer {layer} ({type(reason).__name__}: {reason}). With run_dir=, finished "
            "layers are saved: repeat the same call for the rest."
        ) from reason


def _received(data: Any, layer: int, identity: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """A packed layer, looked at before it is used: what an executor hands back need not be what was sent."""
    try:
        if not isinstance(data, bytes):
            raise DamagedPieceError(f"it is a {type(data).__name__}, not bytes")
        return unpack(data, layer_piece(layer), identity)
    except DamagedPieceError as error:
        raise RunError(
            f"What the executor returned for layer {layer} is not a result of this run: {error}. Check that its "
            "workers run this package, and repeat the call: with run_dir=, finished layers are saved."
        ) from error


def _cancel(futures: Iterable[Any]) -> None:
    for future in futures:
        future.cancel()


def _in_threads(task: LayerTask, identity: dict[str, Any]) -> Callable[[int], bytes]:
    step = task.prepare()

    def call(layer: int) -> bytes:
        return pack(layer_piece(layer), step(layer), identity)

    return call


@dataclass(frozen=True)
class _Shipped:
    """A task for other processes, each of which unpickles and prepares it once.

    It is sent as bytes from the plain pickler: that of multiprocessing would put every tensor into shared memory.
    The bytes go from this process to its own workers, as in any executor; none are read from a file.
    """

    task: bytes
    identity: dict[str, Any]
    shared_digest: str
    layer_digests: dict[int, str]

    @classmethod
    def of(cls, task: LayerTask, layers: Sequence[int], identity: dict[str, Any]) -> "_Shipped":
        weights = task.weights
        digests = {layer: weights.layer_digest(layer) for layer in layers}
        return cls(pickle.dumps(task), identity, weights.shared_digest, digests)

    def __call__(self, layer: int) -> bytes:
        self._require_versions()
        weights, step = _prepared(self.task)
        for part, actual, expected in (
            ("embedding, unembedding or first MLP", weights.shared_digest, self.shared_digest),
            (f"layer {layer}", weights.layer_digest(layer), self.layer_digests[layer]),
        ):
            if actual != expected:
                raise ModelLoadError(
                    f"The worker on {socket.gethostname()} has different weights under {weights.model_name!r} ({part}) "
                    "from the process that started the sweep. Use a folder that all workers can see, or equal copies."
                )
        return pack(layer_piece(layer), step(layer), self.identity)

    def _require_versions(self) -> None:
        versions = package_versions()
        for name, expected in self.identity["versions"].items():
            if versions[name] != expected:
                raise RunError(
                    f"The worker on {socket.gethostname()} has {name} {versions[name]}, the process that started the "
                    f"sweep has {expected}; numbers may differ in the last digit. Install the same version everywhere."
                )


_LAST: list[tuple[str, tuple[HeadWeights, LayerStep]]] = []
"""What a worker keeps from one layer to the next: the last task it prepared."""


def _prepared(task: bytes) -> tuple[HeadWeights, LayerStep]:
    key = hashlib.sha256(task).hexdigest()
    if not _LAST or _LAST[0][0] != key:
        loaded: LayerTask = pickle.loads(task)
        _LAST[:] = [(key, (loaded.weights, loaded.prepare()))]
    return _LAST[0][1]
