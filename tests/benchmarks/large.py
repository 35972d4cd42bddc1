"""Models larger than memory: a checkpoint with the shapes of Llama-3.1-70B, and the default model from disk.

Memory is measured in processes of their own: the peak of resident memory as the kernel keeps it (VmHWM), and its
anonymous and mapped parts at the fullest moment that was sampled. Pages of mapped files count like all others, though
the system may drop them. What `import torch` takes comes before anything of ours and is measured as well.
"""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tl_headmaps import HeadWeights, load_relations, relation_scores
from tl_headmaps.capture.bundled import default_model_folder

SHAPE = {"d_model": 8192, "n_heads": 64, "n_kv_heads": 8, "d_head": 128, "d_mlp": 28672, "n_vocab": 128_256}
N_LAYERS = 3
SOURCES = (250, 500, 1000)
LAYERS_70B = 80

# What a layer of exact ranks multiplies out, with V = 128,256 tokens, d = 8192, H = 64 heads of r = 128, n sources:
#   column factors W_U W_O^T of all heads   2 V d (H r) = 1.7e13 flop, whatever n is
#   the entries of n rows of all heads      2 n r V H   = 2.1e12 flop for n = 1,000
# Scores leave early: the factors are needed for the first 2,048 tokens (2.7e11) and once more for the n targets
# (1.3e11); a random target is undecided after those with a chance of about 50 / 2,048, and the 24 rows of each head
# that stay go through d instead (2 * 24 H d V = 3.2e12). Heads with a hit by chance (n k / V per direction, k = 25: a
# fifth of them) pay for their null: their part of the factors, and entries up to the 25 best columns.
# Together some 5e12 to 1e13 flop a layer, so time is affine in n: a part for the factors, a part for each source.

MEASURED = """
import json, sys, threading, time

def status():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {name: int(fields[name].split()[0]) / 2**20 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}

fullest, done = status(), threading.Event()

def watch():
    global fullest
    while not done.wait(0.01):
        fullest = max(fullest, status(), key=lambda now: now["VmRSS"])

thread = threading.Thread(target=watch)
thread.start()
arguments, answer = json.loads(sys.argv[1]), {}
try:
    exec(compile(sys.argv[2], "bench", "exec"))
finally:
    done.set()
    thread.join()
print(json.dumps({**answer, "peak_gib": status()["VmHWM"], "anonymous_gib": fullest["RssAnon"],
                  "file_gib": fullest["RssFile"]}))
"""

SWEEP = """
import torch
from tl_headmaps import HeadWeights, Relation, relation_scores
torch.set_grad_enabled(False)
start = time.perf_counter()
weights = HeadWeights.from_checkpoint(arguments["folder"])
opened = time.perf_counter() - start
start = time.perf_counter()
weights.fingerprint
hashed = time.perf_counter() - start
seconds = []
for n in arguments["sources"]:
    generator = torch.Generator().manual_seed(0)
    sources = torch.randperm(weights.n_vocab, generator=generator)[:n].tolist()
    targets = torch.randint(weights.n_vocab, (n,), generator=generator).tolist()
    relation = Relation.from_pairs("random", list(zip(sources, targets)))
    heads = [(layer, head) for layer in arguments["layers"] for head in range(weights.n_heads)]
    start = time.perf_counter()
    relation_scores(weights, relation, heads=heads, ranks=arguments["ranks"], run_dir=arguments["run"], progress=False)
    seconds.append(time.perf_counter() - start)
answer = {"open_seconds": opened, "fingerprint_seconds": hashed, "seconds": seconds}
"""

BARE = "import torch"

TOKENIZER = """
import torch
from pathlib import Path
from tl_headmaps.capture.checkpoint.reader import open_tokenizer
open_tokenizer("bench", Path(arguments["folder"]), {"model_type": "llama"})
"""

LOADED = """
from tl_headmaps import load_default_model
model = load_default_model(device="cpu")
"""

SCORES = """
from tl_headmaps import relation_scores
heads = [(layer, head) for layer in (5, 23) for head in range(9)]
relation_scores(model, ["country_to_capital", "past_tense"], heads=heads, progress=False)
"""

FROM_DISK = """
from tl_headmaps import HeadWeights
model = HeadWeights.from_checkpoint(arguments["folder"])
"""


def measured(code: str, **arguments: Any) -> dict[str, Any]:
    """Run code in a process of its own; what it answers, and its peak memory in GiB."""
    command = [sys.executable, "-X", "faulthandler", "-c", MEASURED, json.dumps(arguments), code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The measured process ended with {done.returncode}: {done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def write_70b(folder: Path) -> None:
    """All that is read of a model of this shape, random, bfloat16; later layers' MLPs, never read, are left out."""
    s = SHAPE
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": s["d_model"],
        "num_attention_heads": s["n_heads"],
        "num_key_value_heads": s["n_kv_heads"],
        "head_dim": s["d_head"],
        "num_hidden_layers": N_LAYERS,
        "intermediate_size": s["d_mlp"],
        "vocab_size": s["n_vocab"],
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Random bytes: three billion normal deviates would take longer than the bench.
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        for part in values.split(4096):
            levels = generator.integers(-128, 128, tuple(part.shape), dtype=np.int8)
            part.copy_(torch.from_numpy(levels)).mul_(0.02 / 74)
        return values

    files: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file)
        files.update(dict.fromkeys(tensors, file))

    d, q, kv = s["d_model"], s["n_heads"] * s["d_head"], s["n_kv_heads"] * s["d_head"]
    write("embed.safetensors", {"model.embed_tokens.weight": matrix(s["n_vocab"], d)})
    write("unembed.safetensors", {"lm_head.weight": matrix(s["n_vocab"], d)})
    write("norm.safetensors", {"model.norm.weight": torch.ones(d, dtype=torch.bfloat16) * 1.5})
    sizes = {"up_proj": (s["d_mlp"], d), "gate_proj": (s["d_mlp"], d), "down_proj": (d, s["d_mlp"])}
    mlp = {f"model.layers.0.mlp.{name}.weight": matrix(*size) for name, size in sizes.items()}
    norms = {"model.layers.0.post_attention_layernorm.weight": torch.ones(d, dtype=torch.bfloat16)}
    write("mlp.safetensors", mlp | norms)
    for layer in range(N_LAYERS):
        prefix = f"model.layers.{layer}."
        attention = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        tensors = {f"{prefix}self_attn.{name}.weight": matrix(*size) for name, size in attention.items()}
        tensors[f"{prefix}input_layernorm.weight"] = torch.ones(d, dtype=torch.bfloat16)
        write(f"layer-{layer}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def bench_70b(_weights: Any = None) -> dict[str, Any]:
    """Heads of a 70B-shaped model for up to 1,000 sources: time by layers and sources, and peak memory."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as name:
        folder = Path(name) / "model"
        folder.mkdir()
        write_70b(folder)
        run = Path(name) / "run"
        most, fewer = SOURCES[-1], list(SOURCES[:-1])
        layers = list(range(N_LAYERS))
        everything = measured(SWEEP, folder=str(folder), sources=[most], layers=layers, ranks=False, run=str(run))
        written = [path.stat().st_mtime for path in (run / "run.json", *sorted(run.glob("layer-*.safetensors")))]
        by_layer = [after - before for before, after in itertools.pairwise(written)]
        # Time only, so one process does; the largest size is a layer of the run above.
        small = measured(SWEEP, folder=str(folder), sources=fewer, layers=[1], ranks=False, run=None)
        exact = measured(SWEEP, folder=str(folder), sources=[fewer[0]], layers=[1], ranks=True, run=None)
    # The first layer also prepares what all share (source vectors, order of the unembedding).
    later = by_layer[1:]
    return {
        "shape": SHAPE,
        "layers": N_LAYERS,
        "sources": most,
        "peak_resident_gib": everything["peak_gib"],
        "peak_anonymous_gib": everything["anonymous_gib"],
        "peak_mapped_file_gib": everything["file_gib"],
        "open_seconds": everything["open_seconds"],
        "fingerprint_seconds_per_layer": everything["fingerprint_seconds"] / N_LAYERS,
        "seconds_by_layer": by_layer,
        "seconds_per_layer": sum(later) / len(later),
        "hours_for_80_layers": (by_layer[0] + sum(later) / len(later) * (LAYERS_70B - 1)) / 3600,
        "seconds_by_sources": dict(zip(SOURCES, [*small["seconds"], by_layer[1]], strict=True)),
        "exact_ranks_sources": fewer[0],
        "exact_ranks_seconds_one_layer": exact["seconds"][0],
        "exact_ranks_peak_resident_gib": exact["peak_gib"],
    }


def bench_default_from_disk(weights: Any) -> dict[str, Any]:
    """The default model from its checkpoint against the loaded one: time of the same scores, peak memory."""
    read = HeadWeights.from_checkpoint(default_model_folder())
    relations = load_relations("knowledge", model=weights)
    heads = [(layer, head) for layer in (5, 15) for head in range(weights.n_heads)]

    def scored(source: HeadWeights) -> float:
        start = time.perf_counter()
        relation_scores(source, relations, heads=heads, progress=False)
        return time.perf_counter() - start

    for source in (weights, read):
        scored(source)
    times: dict[str, list[float]] = {"loaded": [], "checkpoint": []}
    for _ in range(3):
        times["loaded"].append(scored(weights))
        times["checkpoint"].append(scored(read))
    best = {name: min(values) for name, values in times.items()}
    return {
        "seconds": best,
        "checkpoint_over_loaded": best["checkpoint"] / best["loaded"],
        **memory_of_default(),
    }


def memory_of_default() -> dict[str, Any]:
    """Peak memory of the same scores from the checkpoint and from the loaded model, and of what neither can do without.

    Transformers maps the file of a model it loads, so loading alone has hardly read the weights yet: the like of
    scores from the checkpoint is scores from the loaded model.
    """
    folder = str(default_model_folder())
    processes = {
        "bare_torch": BARE,
        "torch_and_tokenizer": TOKENIZER,
        "loading": LOADED,
        "loaded_with_scores": LOADED + SCORES,
        "checkpoint_with_scores": FROM_DISK + SCORES,
    }
    names = {"peak_gib": "peak", "anonymous_gib": "anonymous", "file_gib": "mapped"}
    mib = {
        name: {short: 1024 * found[long] for long, short in names.items()}
        for name, code in processes.items()
        for found in [measured(code, folder=folder)]
    }
    peak = {name: values["peak"] for name, values in mib.items()}
    ours, bare = peak["checkpoint_with_scores"], peak["bare_torch"]
    ratios = {}
    for name in ("loading", "loaded_with_scores"):
        ratios[f"memory_over_{name}"] = ours / peak[name]
        ratios[f"memory_over_{name}_above_bare_torch"] = (ours - bare) / (peak[name] - bare)
    return {"mib": mib, **ratios, "floor_over_loading": peak["torch_and_tokenizer"] / peak["loading"]}


def bench_workers(_weights: Any = None) -> dict[str, Any]:
    """The same layers by one worker process and by two, one thread each, after both have started."""
    read = HeadWeights.from_checkpoint(default_model_folder())
    relations = load_relations("knowledge", model=read)
    heads = [(layer, head) for layer in range(4, 16) for head in range(read.n_heads)]
    warm_up = [(layer, 0) for layer in range(4)]

    def with_workers(n: int) -> float:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(n, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            call: Callable[..., Any] = relation_scores
            call(read, relations, heads=warm_up, executor=pool, progress=False)
            start = time.perf_counter()
            call(read, relations, heads=heads, executor=pool, progress=False)
            return time.perf_counter() - start

    one, two = with_workers(1), with_workers(2)
    return {"layers": 12, "seconds_one_worker": one, "seconds_two_workers": two, "speedup": one / two}
