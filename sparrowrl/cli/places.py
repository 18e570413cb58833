"""What a path given on the command line is: a journal, a run, an artifact, a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparrowrl.config import RUN_NAME, Credentials
from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.keys import is_key, parse_artifact_name
from sparrowrl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def journals_at(path: Path, credentials: Path | None = None) -> list[tuple[Journal, ArtifactRef | None]]:
    """The runs at a journal's root, the run at `runs/<run>`, or the artifact at `runs/<run>/v/<version>/<name>`.

    With a credentials file, MACs are checked, and only its run is taken. Raises ConfigError if it is none of these.
    """
    keys = Credentials.load(credentials) if credentials is not None else None
    path = path.resolve()
    artifact = None
    if len(path.parts) > 5 and is_key("/".join((*path.parts[-5:], "manifest"))):
        kind, base, codec = parse_artifact_name(path.name)
        artifact = ArtifactRef(int(path.parts[-2]), path.name, kind, base, codec)
        root, runs = path.parents[4], [path.parts[-4]]
    elif path.parent.name == "runs" and path.is_dir():
        root, runs = path.parents[1], [path.name]
    elif (path / "runs").is_dir():
        root, runs = path, sorted(entry.name for entry in (path / "runs").iterdir() if RUN_NAME.fullmatch(entry.name))
    else:
        raise ConfigError(f"{path}: expected a journal (with a folder runs), runs/<run>, or an artifact's folder in it")
    if keys is not None:
        if keys.run not in runs:
            raise ConfigError(f"{credentials}: expected credentials of run {' or '.join(runs)}, got run {keys.run}")
        runs = [keys.run]
    return [(Journal(root, run, keys.run_key if keys is not None else None), artifact) for run in runs]


def load_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, or of all such files in a directory.

    Raises ConfigError if there is none, one cannot be read, or a tensor is in two of them.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ConfigError("reading a checkpoint needs safetensors: pip install safetensors") from error
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path}: expected *.safetensors files in it, got none")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: not a safetensors file that can be read ({error})") from error
        if twice := weights.keys() & found.keys():
            raise ConfigError(f"{file}: tensor {min(twice)} is in an earlier file of {path} too")
        weights |= found
    return weights
