"""What surrounds an analysis: browsers, vocabularies, kills, full disks.

A try returns True if it was let through and held, False if it was refused; anything else is an exception.
"""

import ctypes
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from every_result import ANALYSES
from mutations import HOSTILE
from planted import hosted, source_model, word_tokenizer
from workshop import Workshop, in_child

from tl_headmaps import Result, ValueMixing

_MEANT = ("kind", "circuit", "measure", "method", "head", "heads")
"""Fields whose words decide what a result is."""


def page(shop: Workshop, generator: random.Random) -> bool:
    """Hostile strings in every field that reaches a page: nothing runs, and nothing is asked for."""
    result = generator.choice(list(shop.results.values()))

    def poisoned(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: poisoned(inside, name) for name, inside in value.items()}
        if isinstance(value, list):
            return [poisoned(inside, key) for inside in value]
        changeable = isinstance(value, str) and key not in _MEANT
        return generator.choice(HOSTILE) if changeable and generator.random() < share else value

    path = shop.folder / "poisoned.json"
    share = generator.choice((0.05, 0.5, 1.0))
    path.write_text(json.dumps(poisoned(json.loads(result.to_json()))), "utf-8")
    if generator.random() < 0.1:
        tokens = [generator.choice(HOSTILE) for _ in range(3)]
        drawn: Result = ValueMixing.from_arrays(torch.eye(3), torch.ones(3, 2), tokens)
    else:
        drawn = Result.load(path)
    _open(shop, drawn, generator)
    return True


def vocabulary(shop: Workshop, generator: random.Random) -> bool:
    """A tokenizer whose tokens are hostile: what analyses print, list and draw of them."""
    words = word_tokenizer(61)
    state = json.loads(words.backend_tokenizer.to_str())
    names = [f"Ġword{number}" for number in range(40, 61)]
    for name in names:
        state["model"]["vocab"][f"{generator.choice(HOSTILE)}{name[5:]}"] = state["model"]["vocab"].pop(name)
    words._tokenizer = type(words._tokenizer).from_str(json.dumps(state))
    model = hosted(source_model("llama"), "llama", words=words)
    name = generator.choice(("token_grid", "salient_operations", "relation_scores", "name_heads", "validate"))
    _open(shop, ANALYSES[name](model), generator)
    return True


def _open(shop: Workshop, drawn: Result, generator: random.Random) -> None:
    """Write a result in every form of text, open its page and its print in a browser, and touch everything there."""
    assert str(drawn) is not None
    drawn.to_csv()
    _check_latex(drawn.figure().latex("x.pdf"))
    if list(drawn.to_rows()):
        _check_latex(drawn.to_latex(caption=generator.choice(HOSTILE)))
    suffix = generator.choice((".html", ".html", ".svg"))
    path = drawn.save(shop.folder / f"poisoned{suffix}")
    if shop.browser is None:
        return
    shop.browser.open(path, dark=generator.random() < 0.2)
    if suffix == ".html":
        shop.browser.run(_TOUCH)
        shop.browser.settle()
    assert shop.browser.run("typeof window.sprung") == "undefined", "a script of a label ran"
    outside = [url for url in shop.browser.requests if not url.startswith(("file:", "data:", "blob:", "about:"))]
    assert not outside, f"the page asked for {outside[0]}"


_LATEX = {
    *("begin", "end", "toprule", "midrule", "bottomrule", "caption", "label", "centering", "includegraphics"),
    *("textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar"),
    *("ensuremath", "leq", "geq", "rightarrow", "infty", "times"),
}
"""Every command that our tables and captions have."""


def _check_latex(text: str) -> None:
    r"""No command but our own, no brace without the other, and ``^^`` nowhere."""
    shown = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert set(re.findall(r"\\([A-Za-z]+)", shown)) <= _LATEX, text
    bare = re.sub(r"\\[{}]", "", shown)
    assert bare.count("{") == bare.count("}") and "^^" not in shown, text


_TOUCH = """[...document.querySelectorAll('*')].slice(0, 3000).forEach(element => {
  for (const kind of ['mouseover', 'mousemove', 'mouseenter', 'pointermove', 'focus'])
    element.dispatchEvent(new MouseEvent(kind, {bubbles: kind !== 'mouseenter', clientX: 5, clientY: 5}));
  const safe = !element.closest('a[download], a[href]') && !/download|save/i.test(element.textContent.slice(0, 40));
  if (safe && element.matches('button, summary, [role=button], [tabindex], rect, td, option, select')) {
    element.dispatchEvent(new MouseEvent('click', {bubbles: true}));
    element.dispatchEvent(new Event('change', {bubbles: true}));
  }
}), 1"""


def kill(shop: Workshop, generator: random.Random) -> bool:
    """Killed at any I/O event, a run resumes to the same bytes, and nothing temporary is left."""
    reproduces = generator.random() < 0.3
    make, files, whole = (
        (shop.reproduced, shop.reproduction_files, shop.whole_reproduction)
        if reproduces
        else (shop.swept, shop.run_files, shop.whole_run)
    )
    folder = shop.folder / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    after = generator.randrange(1, 120)

    def doomed() -> None:
        left = [after]

        def count(event: str, _: Any) -> None:
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        make("killed")

    assert in_child(doomed) in (0, -signal.SIGKILL)
    with redirect_stderr(io.StringIO()):
        make("killed")
    assert files(folder) == whole, f"killed after {after} events, the run has other bytes"
    left = [path.name for place in (folder.rglob, shop.folder.glob) for path in place(".*.part")]
    assert not left, f"killed after {after} events: {left} stays"
    if not reproduces:
        Result.load(shop.folder / "killed.json")
    return True


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A file system of a few bytes, if this process may mount one."""
    folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) == 0
    try:
        yield mounted
    finally:
        if mounted:
            libc.umount2(os.fsencode(folder), 2)


def full_disk(shop: Workshop, generator: random.Random) -> bool:
    """A disk that is full: a sentence, the old file as it was, and nothing half-written."""
    result = generator.choice(list(shop.results.values()))
    name = "result" + generator.choice((".json", ".csv", ".tex", ".safetensors", ".html", ".svg", ".parquet"))
    size = generator.choice((4096, 8192, 16384, 65536))
    with small_disk(shop.folder / "disk", size) as mounted:
        target = shop.folder / "disk" / name
        target.write_text("old")

        def limited(call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> None:
                if not mounted:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                call()

            return run

        code = in_child(limited(lambda: result.save(target)))
        assert code in (0, 1), f"exit {code}"
        assert (target.read_text("utf-8", "replace") == "old") == (code == 1), "the old file is gone"
        assert [path.name for path in target.parent.iterdir()] == [name]
        if mounted and generator.random() < 0.3:
            code = in_child(lambda: shop.swept("disk/run"))
            assert code in (0, 1), f"a run on a full disk: exit {code}"
            assert not list(target.parent.rglob(".*.part"))
            shutil.rmtree(shop.folder / "disk" / "run", ignore_errors=True)
        target.unlink()
    return code == 0
