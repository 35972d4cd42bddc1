"""The question that CONTRIBUTING.md builds, run as it stands there."""

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from planted import shared_model, word

import tl_headmaps
from tl_headmaps.cli.build import Command
from tl_headmaps.cli.commands import COMMANDS
from tl_headmaps.cli.signatures import Signature
from tl_headmaps.results import Result

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEXTS = [" ".join(word(20 + (5 * n + i * (n + 1)) % 37) for i in range(8)) for n in range(9)]


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    file = tmp_path_factory.mktemp("question") / "head_entropy.py"
    file.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("head_entropy", file)
    assert spec is not None and spec.loader is not None
    sys.modules["head_entropy"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result(question: ModuleType) -> Any:
    return question.head_entropy(shared_model("llama"), ["L1", "L2H3"], TEXTS, progress=False)


def test_it_equals_a_plain_double_loop(result: Any) -> None:
    model, expected = shared_model("llama"), []
    for text in TEXTS[2::3]:
        _, cache = model.run_with_cache(model.to_tokens(text))
        rows = cache["blocks.1.attn.hook_pattern"][0, 2].double()
        expected.append(sum(-p * math.log2(p) for row in rows for p in row.tolist() if p > 0) / len(rows))
    assert float(result.entropy[1, 2]) == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_all_that_follows_from_its_fields(result: Any, tmp_path: Path) -> None:
    head, value = result.top(1)[0]
    text = str(result)
    assert f"{head}" in text and f"{value:.2f}" in text and "even: entropy of even attention" in " ".join(text.split())
    assert "of 5 heads look less than half as widely" in text and "best of 5" in text
    page = result.figure()
    assert "How widely heads look" in page.title and "even" in page.body
    rows = list(result.to_rows())
    assert len(rows) == 5 and set(rows[0]) == {"layer", "head", "entropy", "interval_low", "interval_high", "even"}
    assert str(head) in result.to_latex() and r"95\% interval" in result.to_latex()
    assert [f"> {head}", f"{value:.2f}"] in [row[:2] for row in result.head_rows(head).rows]
    # What is not public yet has no place in files' table of kinds; its JSON is its fields.
    values = result.to_dict()
    assert list(values) == ["kind", "axes", "entropy", "interval_low", "interval_high", "even", "n_texts", "provenance"]
    assert type(result).from_dict(values) == result and result.save(tmp_path / "x.html").stat().st_size > 1000


def test_its_command(question: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    signature = Signature(Path(question.__file__ or ""), "head_entropy")
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: shared_model("llama"))
    monkeypatch.setattr(tl_headmaps, "head_entropy", question.head_entropy, raising=False)
    monkeypatch.setattr(Signature, "of_call", lambda _name: signature)
    monkeypatch.setitem(COMMANDS, "entropy", Command("head_entropy", ("heads",)))
    help_page = " ".join(run("entropy", "--help").out.split())
    assert signature.summary in help_page and "Cut texts to this many tokens. Default: 64." in help_page
    run("entropy", "--max-tokens", "0").assert_refused(2, "max_tokens=0 is impossible; it must be at least 1")
    texts, out = tmp_path / "texts.txt", tmp_path / "e.csv"
    texts.write_text("\n\n".join(TEXTS))
    done = run("entropy", "L1", "--heads", "L2H3", "--texts", str(texts), "--out", str(out))
    assert done.code == 0 and "of 5 heads look less than half as widely" in " ".join(done.out.split()), done
    assert len(out.read_text().splitlines()) == 6


def test_bad_input_is_refused_by_what_all_questions_share(question: ModuleType) -> None:
    with pytest.raises(ValueError, match="max_tokens=0 is impossible"):
        question.head_entropy(shared_model("llama"), max_tokens=0)
    with pytest.raises(ValueError, match="2 texts are too few"):
        question.head_entropy(shared_model("llama"), None, TEXTS[:2], progress=False)
    assert "Cut texts to this many tokens." in question.head_entropy.__doc__
    assert issubclass(question.HeadEntropy, Result) and "Mean over queries and texts." in question.HeadEntropy.__doc__
    assert torch.is_grad_enabled() is False  # of the tests; the call leaves it as it was
