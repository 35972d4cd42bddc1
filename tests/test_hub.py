"""From a name on the hub only the files that are needed are fetched: against a stand-in server, no network."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from planted import save_checkpoint, source_model
from safetensors.torch import load_file, save_file

from tl_headmaps import HeadWeights
from tl_headmaps.capture.checkpoint.shards import INDEX, SINGLE

COMMIT = "c" * 40

CALLS = """
import json, sys
from tl_headmaps import HeadWeights, HeadMapsError

answers = []
for name in sys.argv[1:]:
    try:
        weights = HeadWeights.from_checkpoint(name)
        answers.append([weights.fingerprint, weights.model_name, weights.tokenizer is not None])
    except HeadMapsError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


class Hub:
    """Answers as the hub does for the files of some folders, and notes what was asked for."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, with_body: bool) -> None:
                owner, name, resolve, _revision, file = [*self.path.strip("/").split("/", 4), "", "", "", ""][:5]
                folder = repositories.get(f"{owner}/{name}")
                path = None if folder is None or resolve != "resolve" else folder / file
                hub.asked.append(file)
                if path is None or not path.is_file():
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound" if folder is None else "EntryNotFound")
                    self.send_header("X-Repo-Commit", COMMIT)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                data = path.read_bytes()
                self.send_response(200)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{sha256(data).hexdigest()}"')
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if with_body:
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, Path]:
    sharded = save_checkpoint(source_model("llama"), tmp_path / "sharded")
    tensors = load_file(sharded / SINGLE)
    # One shard for each layer, and one for the later MLPs, which nothing reads.
    files = {}
    for name in tensors:
        later = ".mlp." in name and ".layers.0." not in name
        number = name.split(".")[2] if ".layers." in name else "shared"
        files[name] = "unneeded.safetensors" if later else f"layer-{number}.safetensors"
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, sharded / file)
    (sharded / INDEX).write_text(json.dumps({"weight_map": files}))
    (sharded / SINGLE).unlink()
    pickled = save_checkpoint(source_model("llama"), tmp_path / "pickled")
    (pickled / SINGLE).rename(pickled / "pytorch_model.bin")
    return {"some/sharded": sharded, "some/pickled": pickled}


@pytest.fixture
def hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    server = Hub(repositories)
    yield server
    server.close()


def call(hub: Hub, home: Path, *names: str, offline: bool) -> list[Any]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TL_HEADMAPS_CACHE": str(home / "digests"),
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *names], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_only_needed_files_are_fetched_and_then_none(
    hub: Hub, repositories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path / "own"))
    # The folder itself, with the shard that nothing reads taken away.
    (repositories["some/sharded"] / "unneeded.safetensors").rename(tmp_path / "elsewhere")
    expected = HeadWeights.from_checkpoint(repositories["some/sharded"]).fingerprint
    (tmp_path / "elsewhere").rename(repositories["some/sharded"] / "unneeded.safetensors")

    found, pickled, absent = call(hub, tmp_path / "home", "some/sharded", "some/pickled", "some/absent", offline=False)
    assert found == [expected, "some/sharded", True]
    assert {f"layer-{number}.safetensors" for number in (0, 1, 2, "shared")} <= set(hub.asked)
    assert "unneeded.safetensors" not in hub.asked
    assert "pytorch_model.bin" not in hub.asked
    assert f"'some/pickled' on the hub has neither {SINGLE} nor {INDEX}" in pickled
    assert "config.json of 'some/absent' could not be fetched from the hub" in absent

    hub.asked.clear()
    again, refused = call(hub, tmp_path / "home", "some/sharded", "some/absent", offline=True)
    assert again == found
    assert hub.asked == []
    assert "is not in the local cache" in refused and "HF_HUB_OFFLINE" in refused


@pytest.mark.parametrize("name", ["a/b/c", "what is this?", "-x-"])
def test_names_that_cannot_be_on_the_hub(name: str) -> None:
    from tl_headmaps.core.errors import ModelLoadError

    with pytest.raises(ModelLoadError, match="is neither a folder nor a name on the hub"):
        HeadWeights.from_checkpoint(name)
