"""Files that someone else wrote, and options that someone typed.

A try returns True if it was let through and held, False if it was refused; anything else is an exception.
"""

import io
import json
import random
import shutil
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from every_result import NEXT, TEXTS, plain, tasks
from mutations import HOSTILE, RUBBISH, mutated_bytes
from planted import source_model
from workshop import Command, Workshop, cached_in, check_sentence, written

from tl_headmaps import (
    ContextVectors,
    HeadMapsError,
    HeadWeights,
    Relation,
    Result,
    Tasks,
    compare,
    grouping_profile,
    load_model,
    relation_scores,
    task_maps,
    token_grid,
    validate,
)
from tl_headmaps.capture.running.prompts import read_templates
from tl_headmaps.core.errors import HeadMapsWarning
from tl_headmaps.data.texts import read_prompts


def relation_file(shop: Workshop, generator: random.Random) -> bool:
    suffix = generator.choice((".json", ".csv", ".tsv"))
    path = shop.folder / f"relation{suffix}"
    if suffix == ".json":
        written(path, generator.choice([shop.relation, shop.relation["pairs"]]), generator)
    else:
        path.write_bytes(mutated_bytes(b'source,target\r\nFrance,Paris\r\n"a\nb",c\r\n=1,\'x\r\n' * 2, generator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadMapsWarning)
        relation = Relation.from_file(path)
    relation_scores(shop.model, relation, heads="L1H0", progress=False, preset="folded").to_json()
    return True


def task_file(shop: Workshop, generator: random.Random) -> bool:
    suffix = generator.choice((".json", ".jsonl", ".csv"))
    path = shop.folder / f"tasks{suffix}"
    if suffix == ".csv":
        rows = "".join(f'"{n}\n?",a,{f}\r\n' for n in range(10) for f in ("retrieval", "inference"))
        path.write_bytes(mutated_bytes(f"question,answer,function\r\n{rows}".encode(), generator))
    elif suffix == ".jsonl":
        path.write_bytes(mutated_bytes("\n".join(map(json.dumps, shop.tasks)).encode(), generator))
    else:
        written(path, shop.tasks, generator)
    tasks = Tasks.from_file(path, duplicates=generator.choice(("refuse", "drop")))
    assert tasks.digest and tasks.sample(10, seed=0).counts
    return True


def text_file(shop: Workshop, generator: random.Random) -> bool:
    """Texts, prompts and templates: one analysis reads each."""
    path = shop.folder / "lines.txt"
    lines = [*TEXTS[:4], generator.choice(HOSTILE), " word3 <X> word5", " word4 <X>"]
    separator = generator.choice(("\n", "\n\n", "\r\n"))
    path.write_bytes(mutated_bytes(separator.join(lines).encode(), generator))
    kind = generator.choice(("texts", "prompts", "templates"))
    if kind == "texts":
        result: Result = grouping_profile(shop.model, path, progress=False)
    elif kind == "prompts":
        result = token_grid(shop.model, "L1H0", [3, 4], [5, 6], preset="context", prompts=read_prompts(path))
    else:
        result = validate(shop.model, str(shop.relation_file), read_templates(path), preset="folded", progress=False)
    assert result.to_json() and str(result) and result.figure()
    return True


def checkpoint_folder(shop: Workshop, generator: random.Random) -> bool:
    """Configurations, indexes and weights; whatever opens must give finite numbers, both ways the same."""
    folder = shop.empty("hostile")
    for path in shop.checkpoint.iterdir():
        shutil.copy(path, folder)
    kind = generator.choice(("config", "config", "index", "weights", "tokenizer"))
    if kind == "config":
        written(folder / "config.json", json.loads((folder / "config.json").read_text()), generator)
    elif kind == "index":
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        outside = generator.choice(("part.safetensors", "../llama/model.safetensors", "/etc/passwd", "link"))
        (folder / "link").symlink_to(shop.checkpoint / "model.safetensors")
        names = dict.fromkeys(source_model("llama").state_dict(), "part.safetensors")
        names[generator.choice(list(names))] = outside
        written(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": names}, generator)
    elif kind == "weights":
        data = (folder / "model.safetensors").read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        damaged = mutated_bytes(data[:header], generator) + data[header:]
        if generator.random() < 0.3:
            damaged = mutated_bytes(data, generator)
        (folder / "model.safetensors").write_bytes(damaged)
    else:
        name = generator.choice(("tokenizer.json", "tokenizer_config.json"))
        written(folder / name, json.loads((folder / name).read_text()), generator)
    outcomes = []
    for open_it in (HeadWeights.from_checkpoint, lambda path: load_model(str(path), "cpu")):
        try:
            outcomes.append(plain(token_grid(open_it(folder), "L1H0", [3, 4], [5, 6], preset="folded")))
        except HeadMapsError as error:
            check_sentence(error)
    if len(outcomes) == 2 and kind != "tokenizer":
        first, second = (torch.tensor(outcome["values"]) for outcome in outcomes)
        assert torch.allclose(first, second, atol=1e-4), "a folder gives two different results"
    return bool(outcomes)


def result_file(shop: Workshop, generator: random.Random) -> bool:
    """Whatever loads can be printed, listed, saved in every form, drawn, and compared with what it was."""
    name = generator.choice(list(shop.results))
    path = shop.folder / "result.json"
    if generator.random() < 0.2:
        path = shop.results[name].save(shop.folder / "result.safetensors")
        path.write_bytes(mutated_bytes(path.read_bytes(), generator))
    else:
        written(path, json.loads(shop.results[name].to_json()), generator)
    loaded = Result.load(path)
    assert str(loaded) is not None and loaded.to_json() and loaded.figure()
    loaded.to_csv()
    assert Result.load(loaded.save(shop.folder / "again.json")) == loaded
    for finish in (
        loaded.to_latex,
        lambda: loaded.save(shop.folder / f"again{generator.choice(('.html', '.svg'))}"),
        lambda: str(compare(shop.results[name], loaded)),
    ):
        try:
            finish()
        except HeadMapsError as error:  # without rows, too large to draw, or of another model
            check_sentence(error)
    return True


def run_folder(shop: Workshop, generator: random.Random) -> bool:
    """A damaged file of a run is made again, bit for bit, or the folder is refused."""
    whole = shop.whole_run
    _damaged_file(shop.copy("whole", "run"), generator)
    with redirect_stderr(io.StringIO()):
        assert shop.run_files(shop.swept("run")) == whole, "a damaged run has other bytes"
    return True


def reproduction_folder(shop: Workshop, generator: random.Random) -> bool:
    """The same of a reproduction, whose tables are written from its pieces."""
    whole = shop.whole_reproduction
    _damaged_file(shop.copy("whole-reproduction", "reproduction"), generator)
    with redirect_stderr(io.StringIO()):
        assert shop.reproduction_files(shop.reproduced("reproduction")) == whole, (
            "a damaged reproduction has other bytes"
        )
    return True


def cache_file(shop: Workshop, generator: random.Random) -> bool:
    """A damaged file of the activation cache, or of context vectors, is made again, bit for bit."""

    folder = shop.folder / "kept"

    def made() -> Any:
        with redirect_stderr(io.StringIO()), cached_in(folder):
            # All layers: files of others are not even looked at.
            context = relation_scores(shop.model, NEXT, preset="context", progress=False)
            return plain(context), plain(task_maps(shop.model, tasks(), n_null=9, progress=False))

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    expected, before = made(), files()
    path = _damaged_file(folder, generator)
    try:
        assert made() == expected, f"{path.name} was damaged, and the numbers are others"
        assert files() == before, f"{path.name} was damaged, and the cache has other bytes"
    finally:
        path.write_bytes(before[path])
    return True


def vectors_folder(shop: Workshop, generator: random.Random) -> bool:
    """Context vectors of someone else: refused, or the scores of undamaged ones."""
    if not (shop.folder / "vectors").exists():
        made = ContextVectors.of(
            shop.model, [(token,) for token in range(3, 9)], [" word30"], cache_dir=shop.folder / "v"
        )
        made.folder.rename(shop.folder / "vectors")
    relation = Relation.from_pairs("own", [(token, token + 1) for token in range(3, 8)])

    def scores(name: str) -> Any:
        weights = HeadWeights.from_checkpoint(shop.checkpoint)
        options: dict[str, Any] = {"preset": "context", "vectors": shop.folder / name, "progress": False}
        return relation_scores(weights, relation, **options)

    expected = scores("vectors")
    folder = shop.copy("vectors", "hostile-vectors")
    if generator.random() < 0.5:
        written(folder / "vectors.json", json.loads((folder / "vectors.json").read_text()), generator)
    else:
        _damaged_file(folder, generator)
    found = scores("hostile-vectors")
    assert found.promote.equal(expected.promote) and str(found), "damaged vectors give other numbers"
    return True


def _damaged_file(folder: Path, generator: random.Random) -> Path:
    path = generator.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"))
    path.write_bytes(mutated_bytes(path.read_bytes(), generator))
    return path


def command_line(shop: Workshop, generator: random.Random) -> bool:
    """Options with anything in them: exit code 0, 1 or 2, no traceback, and a file that loads where all went well."""
    command, *arguments = _valid_command(shop, generator)
    out = shop.folder / f"out{generator.choice(['.json', '.csv', '.html', '.tex', '.safetensors', '.txt', ''])}"
    out.unlink(missing_ok=True)
    has_out = command not in ("cite", "doctor", "reproduce")
    if has_out:
        arguments += ["--out", str(out)]
    places = [str(shop.folder), str(shop.checkpoint), "~nosuch/x", "y" * 5000, "/dev/full", "/dev/null", "a\udc80b"]
    safe = [str(value).replace("\0", "") for value in (*RUBBISH, *places, "L1H0")]
    for _ in range(generator.choice((0, 1, 1, 1, 2))):
        kind = generator.randrange(4)
        if kind == 0 and arguments:
            arguments.pop(generator.randrange(len(arguments)))
        elif kind == 1:
            extra = ("--device", "--out", "--nothing", "--seed", "--checkpoint", "--model", "--prepend-bos", "--k")
            arguments += [generator.choice(extra), generator.choice(safe)]
        elif arguments:
            arguments[generator.randrange(len(arguments))] = generator.choice(safe)
    done = Command.run(command, *arguments)
    told = (done.code, command, arguments, done.err[-500:])
    assert done.code in (0, 1, 2) and "Traceback" not in done.err, told
    assert done.code == 0 or done.err.strip() or command == "doctor", told
    if done.code == 0 and has_out and arguments[-2:] == ["--out", str(out)] and "--help" not in arguments:
        assert out.stat().st_size, told
        if out.suffix in (".json", ".safetensors"):
            Result.load(out)
    return bool(done.code == 0)


def _valid_command(shop: Workshop, generator: random.Random) -> list[str]:
    text = "word3 word4 word5 word6 word7 word8 word3 word4 word9"
    model, checkpoint = (["--model", str(shop.checkpoint)], ["--checkpoint", str(shop.checkpoint)])
    texts, saved = shop.folder / "texts.txt", shop.folder / "saved.json"
    texts.write_text("\n\n".join(TEXTS))
    shop.results["grouping_profile"].save(saved)
    relation = str(shop.relation_file)
    data = shop.folder / "tasks.json"
    data.write_text(json.dumps([{**item, "question": f" word3 {item['question']}"} for item in shop.tasks]))
    grid = ["--head", "L1H0", "--sources", "#3,#4", "--targets", "#5", "--circuit", "ov", "--preset", "maps"]
    phrases = [f"{phrase} word{asked}:word{asked}" for phrase in ("word3 word9", "word4 word9") for asked in (7, 8)]
    commands = [
        ["grid", *grid, *checkpoint],
        ["relations", relation, "--heads", "L1H0", "--k", "3", "--run-dir", str(shop.folder / "cli"), *checkpoint],
        ["relations", relation, "--preset", "context", *model],
        ["head", "L1H2", "--relations", relation, "--preset", "folded", "--text", text, "--texts", str(texts), *model],
        ["model", *generator.choice((model, checkpoint))],
        ["cite", str(saved)],
        ["salient", "--heads", "L1H0,L0", "--n-tokens", "4", "--n-targets", "2", *checkpoint],
        ["name-heads", "--vocabulary", "all", *checkpoint],
        ["groups", "--text", text, "--layers", "1,2", "--n-groups", "2", "--threshold", "0.4", *model],
        ["profile", "--texts", str(texts), "--max-texts", "5", "--max-tokens", "6", *model],
        ["mixing", "--text", text, "--head", "L1H0", "--query", "word9", "--key", "word5", *model],
        ["association", "--text", text, "--query", "word9", "--key", "word5", "--measure", "dot", *model],
        ["compare-attention", *(f"--phrases={phrase}" for phrase in phrases), "--key", "word9", *model],
        ["compare", str(saved), str(saved), "--names", "a,b"],
        ["components", "--metric", "stable_rank", "--seed", "0", *checkpoint],
        ["components", "--metric", "relative_change", "--against", str(shop.checkpoint), *checkpoint],
        ["tasks", "--data", str(data), "--n-folds", "3", "--n-null", "9", "--sample", "10", "--seed", "1", *model],
        ["validate", relation, "--k", "5", "--seed", "3", "--preset", "folded", *model],
        ["trust", "--texts", str(texts), "--heads", "L1", "--n-null", "1", "--seed", "0", *model],
        ["worth", "--texts", str(texts), "--heads", "L1H2", "--max-texts", "3", *model],
        ["ablate", relation, "--heads", "L0H1", "--controls", "none", "--n-random", "2", "--preset", "folded", *model],
        ["doctor", *model],
    ]
    return generator.choice(commands)
