"""Speed and memory against the obvious way, as ratios within one run: ``make bench`` writes figures.json.

The obvious way forms W_V @ W_O for a head, multiplies the sources' vectors through to the whole vocabulary and takes
two top-k of every row. Times on a shared machine wander, ratios of interleaved repetitions much less.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from large import bench_70b, bench_default_from_disk, bench_workers

from tl_headmaps import (
    HeadWeights,
    ablate,
    component_map,
    load_default_model,
    load_relations,
    load_tasks,
    relation_scores,
    salient_operations,
    task_maps,
    token_grid,
    validate,
)
from tl_headmaps.capture.anatomy import parameters_digest
from tl_headmaps.capture.components.gradients import mean_loss
from tl_headmaps.capture.components.matrices import ModelComponents
from tl_headmaps.capture.running.activations import prepends_bos, run
from tl_headmaps.capture.running.answers import encode_question
from tl_headmaps.capture.running.context import context_vectors
from tl_headmaps.capture.running.head_features import capture_head_features
from tl_headmaps.capture.running.prompts import encode_prefixes, fill
from tl_headmaps.capture.running.text import token_batches
from tl_headmaps.circuits.maps import CircuitMaps
from tl_headmaps.circuits.ranking import ranks
from tl_headmaps.circuits.vectors import cache_of, vocabulary_vectors
from tl_headmaps.core.files import replacing
from tl_headmaps.core.provenance import package_versions
from tl_headmaps.data.relations import encode, resolve
from tl_headmaps.data.texts import neutral_prompts, read_texts
from tl_headmaps.naming.namer import Namer
from tl_headmaps.scorers.components import random_baseline

LAYERS = (5, 15, 25)
RELATION_LAYERS = (5, 15, 23, 25)
"""Evenly spread, and layer 23, which hits most relations: most rows stay to the end there, so it gains least."""
TOP = 25
CONTRIBUTION_TOKENS = 8192


class Peak:
    """Highest resident memory above the start, in MiB."""

    mib = 0.0


@contextmanager
def peak_memory() -> Any:
    process, peak, done = psutil.Process(), Peak(), threading.Event()
    start = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.005):
            peak.mib = max(peak.mib, (process.memory_info().rss - start) / 2**20)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int = 3) -> dict[str, float]:
    """Median time of each call, taken in turns so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: median(values) for name, values in times.items()}


def obvious_rows(weights: HeadWeights, layer: int, head: int, vectors: torch.Tensor, W_U: torch.Tensor) -> Any:
    """Dense rows of one head and two top-k, with the published preset."""
    read = weights.layer(layer)
    rows = vectors @ (read.W_V[weights.group_of(head)] @ read.W_O[head]) @ W_U
    return rows.topk(TOP, dim=-1).indices, rows.neg().topk(TOP, dim=-1).indices


def bench_ranks(weights: HeadWeights) -> dict[str, Any]:
    """Ranks of 1,400 targets of real relations over three layers."""
    encoded = [
        encode(relation, weights.tokenizer, n_sources=weights.n_vocab, n_targets=weights.n_vocab)
        for relation in load_relations()
    ]
    pairs = dict.fromkeys((s, t) for entry in encoded for s, t in zip(entry.source_ids, entry.target_ids, strict=True))
    sources, targets = torch.tensor(list(pairs)[:1400]).unbind(1)
    rows = torch.arange(len(sources))
    circuits = CircuitMaps(weights, sources, preset="maps")
    maps = {layer: circuits.layer(layer) for layer in LAYERS}
    W_U = weights.W_U.T
    heads = range(weights.n_heads)
    vectors = circuits.row_vectors(1)

    def obvious() -> None:
        for layer in LAYERS:
            for head in heads:
                obvious_rows(weights, layer, head, vectors, W_U)

    def products() -> None:
        for layer_maps in maps.values():
            out = torch.empty(len(sources), 1024)
            for start in range(0, layer_maps.columns.count, 1024):
                block = layer_maps.columns.block(slice(start, start + 1024), [len(sources)] * weights.n_heads)
                for head in heads:
                    block.product(head, layer_maps.left_of(head), out)

    def full() -> None:
        for layer_maps in maps.values():
            ranks(layer_maps, rows, targets)

    def early() -> None:
        for layer_maps in maps.values():
            ranks(layer_maps, rows, targets, limit=TOP)

    with peak_memory() as peak:  # before anything else has grown the heap; also warms up
        full()
        early()
    times = interleaved({"obvious": obvious, "products": products, "full": full, "early": early}, repeats=2)
    return {
        "targets": len(sources),
        "layers": list(LAYERS),
        "seconds": times,
        "full_ranks_speedup": times["obvious"] / times["full"],
        "ranks_up_to_25_speedup": times["obvious"] / times["early"],
        "full_ranks_over_products": times["full"] / times["products"],
        "peak_mib_above_model": peak.mib,
    }


def bench_relations(weights: HeadWeights) -> dict[str, Any]:
    """All bundled relations, layer by layer, nulls included, against relation by relation the obvious way."""
    relations = load_relations(model=weights)
    encoded = [
        encode(relation, weights.tokenizer, n_sources=weights.n_vocab, n_targets=weights.n_vocab)
        for relation in relations
    ]
    W_U = weights.W_U.T

    def obvious(layer: int) -> None:
        # One head, scaled up below: the heads of a layer cost the same.
        for entry in encoded:
            vectors = CircuitMaps(weights, torch.tensor(entry.source_ids), preset="maps").row_vectors(1)
            targets = torch.tensor(entry.target_ids)[:, None]
            for top in obvious_rows(weights, layer, 4, vectors, W_U):
                (top[:, : entry.relation.k] == targets).any(1).float().mean()

    def ours(layer: int) -> None:
        heads = [(layer, head) for head in range(weights.n_heads)]
        relation_scores(weights, relations, preset="maps", heads=heads, progress=False)

    sources = torch.tensor([token for entry in encoded for token in entry.source_ids])
    targets = torch.tensor([token for entry in encoded for token in entry.target_ids])

    def ranked(layer: int) -> None:
        # What every score needs; the rest is p-values, intervals, clusters and neighbours.
        most = max(relation.k for relation in relations)
        ranks(
            CircuitMaps(weights, sources, preset="maps").layer(layer), torch.arange(len(sources)), targets, limit=most
        )

    with peak_memory() as peak:
        ours(RELATION_LAYERS[0])
    speedups, over_ranks, seconds_of = {}, {}, {}
    for layer in RELATION_LAYERS:
        calls = {
            name: lambda call=call, layer=layer: call(layer)
            for name, call in {"obvious": obvious, "ours": ours, "ranks": ranked}.items()
        }
        times = interleaved(calls, repeats=3)
        times["obvious"] *= weights.n_heads
        seconds_of[str(layer)] = times
        speedups[str(layer)] = times["obvious"] / times["ours"]
        over_ranks[str(layer)] = times["ours"] / times["ranks"]
    return {
        "relations": len(relations),
        "pairs": sum(len(entry.kept) for entry in encoded),
        "seconds_by_layer": seconds_of,
        "speedup_by_layer": speedups,
        "over_ranks_by_layer": over_ranks,
        "peak_mib_above_model": peak.mib,
    }


def bench_ablate(weights: HeadWeights) -> dict[str, Any]:
    """99 matched draws, against five draws as whole passes over all prompts, one for every step of the curve."""
    model, relation = load_default_model(device="cpu"), resolve("country_to_capital")
    template, heads = "The capital of <X> is", ["L23H4", "L22H4", "L23H8"]
    filled = [fill(model, template, source) for source, _ in relation.pairs]
    prompts = [prompt.ids for prompt in filled if not isinstance(prompt, str)]

    def curves(n_random: int) -> None:
        ablate(
            model, relation, heads, template=template, controls=None, n_random=n_random, preset="folded", progress=False
        )

    curves(0)  # warms up
    calls = {"pass": lambda: run(model, prompts), "99 draws": lambda: curves(99), "5 draws": lambda: curves(5)}
    times = interleaved(calls, repeats=3)
    times["5 draws as passes"] = times["pass"] * (1 + len(heads) * (1 + 5))
    return {
        "prompts": len(prompts),
        "heads": len(heads),
        "seconds": times,
        "over_5_draws_as_passes": times["99 draws"] / times["5 draws as passes"],
        "over_5_draws": times["99 draws"] / times["5 draws"],
    }


def bench_salient(weights: HeadWeights) -> dict[str, Any]:
    """Salient tokens, targets and names of all heads, against head by head the obvious way (no names)."""
    W_U = weights.W_U.T
    heads = ((5, 3), (15, 1), (23, 4))

    def obvious() -> None:
        # The MLP over the vocabulary, vocab x d_model products and two top-k for each head; scaled up below.
        for layer, head in heads:
            x = vocabulary_vectors(replace(weights), layer, "maps")
            read = weights.layer(layer)
            combined = read.W_V[weights.group_of(head)] @ read.W_O[head]
            tokens = ((x @ combined).norm(dim=-1) / x.norm(dim=-1)).topk(30).indices
            rows = x[tokens] @ combined @ W_U
            rows.topk(5, dim=-1)
            rows.neg().topk(5, dim=-1)

    def ours() -> None:
        cache_of(weights).vectors.clear()
        salient_operations(weights, preset="maps", progress=False)

    def one_head() -> None:
        salient_operations(weights, "L23H4", preset="maps", progress=False)

    naming: list[float] = []
    names = Namer.names

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = names(*arguments)
        naming.append(time.perf_counter() - start)
        return found

    cache_of(weights).vectors.clear()
    with peak_memory() as peak:
        ours()
    Namer.names = timed
    try:
        times = interleaved({"obvious": obvious, "ours": ours}, repeats=3)
    finally:
        Namer.names = names
    times["obvious"] *= weights.n_layers * weights.n_heads / len(heads)
    times |= {"of_that_names": median(naming), "one_head": median(seconds(one_head) for _ in range(3))}
    return {
        "seconds": times,
        "speedup": times["obvious"] / times["ours"],
        "speedup_without_names": times["obvious"] / (times["ours"] - times["of_that_names"]),
        "peak_mib_above_model": peak.mib,
    }


def bench_met(weights: HeadWeights) -> dict[str, Any]:
    """Context vectors of 1,400 sources, against a plain pass; scores with them and without."""
    model = weights.model
    relations = load_relations(model=weights)
    size = weights.n_vocab
    encoded = [encode(relation, weights.tokenizer, n_sources=size, n_targets=size) for relation in relations]
    sources = [(source,) for source in dict.fromkeys(source for entry in encoded for source in entry.source_ids)][:1400]
    prefixes = encode_prefixes(model, neutral_prompts(), prepends_bos(model, None))
    tokens = torch.tensor(sources)
    heads = [(layer, head) for layer in LAYERS for head in range(weights.n_heads)]

    def plain() -> None:
        for prefix in prefixes:
            model(torch.tensor([prefix]), return_type=None)
            for batch in tokens.split(128):
                model(batch, return_type=None)

    def context() -> None:
        with tempfile.TemporaryDirectory() as folder:
            context_vectors(model, sources, prefixes, weights=weights, cache_dir=folder, progress=False)

    def scored(preset: Any) -> None:
        relation_scores(weights, relations, preset=preset, heads=heads, progress=False)

    scored("context")  # the vectors are kept from here on
    with peak_memory() as peak:
        context()
    times = interleaved({"plain": plain, "context": context}, repeats=3)
    scores = interleaved({preset: lambda preset=preset: scored(preset) for preset in ("folded", "context")}, repeats=3)
    return {
        "sources": len(sources),
        "prompts": len(prefixes),
        "seconds": times,
        "over_plain_pass": times["context"] / times["plain"],
        "peak_mib_above_model": peak.mib,
        "score_layers": list(LAYERS),
        "score_seconds": scores,
        "scores_over_folded": scores["context"] / scores["folded"],
    }


def bench_spectra(weights: HeadWeights) -> dict[str, Any]:
    """Whole maps of the spectral metrics, their random baselines included, against svdvals of every matrix."""
    source = ModelComponents(load_default_model(device="cpu"))
    matrices = [source.matrix(layer, name) for layer in range(source.n_layers) for name in source.components]
    source.provenance()  # hashed once for the provenance of all maps

    def obvious() -> list[torch.Tensor]:
        return [torch.linalg.svdvals(matrix) for matrix in matrices]

    def hill(values: torch.Tensor) -> torch.Tensor:
        squares, k = values.square(), len(values) // 2
        return 1 + k / (squares[:k] / squares[k]).log().sum()

    by_definition: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "spectral": lambda values: values[0],
        "stable_rank": lambda values: values.square().sum() / values[0].square(),
        "effective_rank": lambda values: torch.special.entr(values / values.sum()).sum().exp(),
        "tail_exponent": hill,
    }

    def ours(name: str) -> torch.Tensor:
        random_baseline.cache_clear()
        return component_map(source, name, progress=False).values.flatten()

    exact = [torch.linalg.svdvals(matrix.double()) for matrix in matrices]
    differences = {
        name: float((ours(name) / torch.stack([function(values) for values in exact]) - 1).abs().max())
        for name, function in by_definition.items()
    }
    calls: dict[str, Callable[[], Any]] = {name: lambda name=name: ours(name) for name in by_definition}
    times = interleaved({"svdvals": obvious, **calls})
    speedups = {name: times["svdvals"] / times[name] for name in by_definition}
    return {
        "matrices": len(matrices),
        "seconds": times,
        "speedups": speedups,
        "speedup": min(speedups.values()),
        "largest_relative_difference": max(differences.values()),
    }


def bench_contribution(weights: HeadWeights) -> dict[str, Any]:
    """The contribution map of the bundled text against the plain forward and backward passes of the same batches."""
    source = ModelComponents(load_default_model(device="cpu"))
    model = source.model
    batches = token_batches(read_texts(), weights.tokenizer, length=256, max_tokens=CONTRIBUTION_TOKENS)
    parameters = list(model.parameters())

    def plain() -> None:
        with torch.enable_grad():
            for batch in batches.items:
                mean_loss(model, batch).backward()
                for parameter in parameters:
                    parameter.grad = None

    def ours() -> None:
        component_map(source, "contribution", max_tokens=CONTRIBUTION_TOKENS, progress=False)

    with peak_memory() as ours_peak:
        ours()
    with peak_memory() as plain_peak:
        plain()
    times = interleaved({"plain": plain, "ours": ours}, repeats=1)
    return {
        "tokens": batches.n_tokens,
        "seconds": times,
        "over_plain": times["ours"] / times["plain"],
        "peak_mib_above_model": ours_peak.mib,
        "plain_peak_mib_above_ours": plain_peak.mib,
    }


def bench_validation(weights: HeadWeights) -> dict[str, Any]:
    """One relation with four templates, capture included, against projecting every head's output densely."""
    model = load_default_model(device="cpu")
    relation = resolve("country_to_capital")
    entry = encode(relation, weights.tokenizer, n_sources=weights.n_vocab, n_targets=weights.n_vocab)
    words = [relation.pairs[number][0] for number in entry.kept]
    prompts = [fill(model, template, word) for template in relation.neutral_templates for word in words]
    W_U = weights.W_U.T
    kept: dict[int, list[torch.Tensor]] = {}

    def capture() -> None:
        kept.clear()

        def keep(seen: Any) -> None:
            at = torch.tensor([prompts[row].source for row in seen.batch.rows])
            values = seen["v"][torch.arange(len(at)), at].repeat_interleave(weights.n_heads // weights.n_kv_heads, 1)
            kept.setdefault(seen.layer, []).append(torch.cat([values, seen["z"][:, -1]]))

        run(model, [prompt.ids for prompt in prompts], read=("v", "z"), reduce=keep)

    def project() -> None:
        # Three layers, scaled up below: the layers cost the same.
        for layer in LAYERS:
            W_O, rows = weights.layer(layer).W_O, torch.cat(kept[layer])
            for head in range(weights.n_heads):
                logits = rows[:, head] @ W_O[head] @ W_U
                logits.topk(10, dim=-1)
                logits.neg().topk(10, dim=-1)

    with peak_memory() as peak:
        validate(model, relation, preset="maps", progress=False)
    calls = {
        "capture": capture,
        "project": project,
        "ours": lambda: validate(model, relation, preset="maps", progress=False),
    }
    times = interleaved(calls, repeats=1)
    times["obvious"] = times["capture"] + times["project"] * weights.n_layers / len(LAYERS)
    return {
        "prompts": len(prompts),
        "seconds": times,
        "speedup": times["obvious"] / times["ours"],
        "peak_mib_above_model": peak.mib,
    }


def bench_tasks(weights: HeadWeights) -> dict[str, Any]:
    """Capture of head features against the same forward passes alone; probes and importance of all bundled items."""
    model, tasks = load_default_model(device="cpu"), load_tasks()
    asked = [encode_question(model, item.prompt, [item.answer]) for item in tasks.items]
    prompts = [question.answered for question in asked][::10]
    spans = [(len(question.prompt), len(question.answered)) for question in asked][::10]

    def capture() -> None:
        with tempfile.TemporaryDirectory() as folder:
            capture_head_features(model, prompts, spans, parameters="", cache_dir=folder)

    run(model, prompts[:8])  # warms up
    times = interleaved({"forward": lambda: run(model, prompts), "capture": capture}, repeats=3)
    times["fingerprint"] = seconds(lambda: parameters_digest(model))
    with peak_memory() as peak:
        task_maps(model, tasks, n_null=1, progress=False)  # captures what is not on disk yet
        times["kept_run"] = seconds(lambda: task_maps(model, tasks, progress=False))
    return {
        "items": len(tasks),
        "items_captured_here": len(prompts),
        "seconds": times,
        "capture_over_forward": times["capture"] / times["forward"],
        "peak_mib_above_model": peak.mib,
    }


def bench_import(weights: HeadWeights) -> dict[str, Any]:
    """``import tl_headmaps`` in a fresh interpreter, against ``import torch`` and against nothing."""

    def start(statement: str) -> None:
        subprocess.run([sys.executable, "-c", statement], check=True)

    times = interleaved(
        {
            "python": lambda: start("pass"),
            "tl_headmaps": lambda: start("import tl_headmaps"),
            "torch": lambda: start("import torch"),
        },
        repeats=7,
    )
    return {"seconds": times, "import_seconds": times["tl_headmaps"] - times["python"]}


def bench_second_call(weights: HeadWeights) -> dict[str, Any]:
    """A second grid of one model, against the same from weights that were read before."""
    grid: Any = ("L23H4", ["France", "Egypt"], ["Paris", "Cairo"])
    calls = {"model": lambda: token_grid(weights.model, *grid), "weights": lambda: token_grid(weights, *grid)}
    interleaved(calls, repeats=1)  # warms up
    times = interleaved(calls, repeats=9)
    return {"seconds": times, "over_weights": times["model"] / times["weights"]}


BENCHES = {
    "second_call": bench_second_call,
    "import": bench_import,
    "ranks": bench_ranks,
    "relation_scores": bench_relations,
    "ablate": bench_ablate,
    "salient_operations": bench_salient,
    "context": bench_met,
    "spectra": bench_spectra,
    "contribution": bench_contribution,
    "default_from_checkpoint": bench_default_from_disk,
    "workers": bench_workers,
    "llama_70b_shape": bench_70b,
    "validation": bench_validation,
    "task_maps": bench_tasks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", choices=BENCHES, nargs="*", default=list(BENCHES))
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    weights = HeadWeights.from_model(load_default_model(device="cpu"))
    # With --only, the other figures of an earlier run are kept.
    figures: dict[str, Any] = {}
    if options.out and options.out.exists():
        figures = json.loads(options.out.read_text(encoding="utf-8"))
    figures |= {"versions": package_versions(), "threads": torch.get_num_threads()}
    for name in options.only:
        figures[name] = BENCHES[name](weights)
        print(name, json.dumps(figures[name], indent=1), flush=True)
        if options.out:
            with replacing(options.out) as temporary:
                temporary.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
