"""The ids of the tokens that begin, end and pad texts, in the files of a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_token_ids(source: Path, target: Path) -> None:
    """Copies the ids of special tokens from `source` into both files of `target`, since engines differ in
    which file they read, and transformers assumes Llama 2's ids for a config.json without any."""
    found = _token_ids(source / _CONFIG)
    if (source / _GENERATION).is_file():
        found |= _token_ids(source / _GENERATION)
        if source != target:
            shutil.copyfile(source / _GENERATION, target / _GENERATION)
    elif found:
        (target / _GENERATION).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    config = json.loads((target / _CONFIG).read_text(encoding="utf-8"))
    (target / _CONFIG).write_text(json.dumps(config | found, indent=2) + "\n", encoding="utf-8")


def _token_ids(file: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that cannot be read."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return {name: fields[name] for name in _TOKEN_IDS if fields.get(name) is not None}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"is not a JSON object: {error}", field=file.name, received=str(file), fix="fetch it again"
        ) from error
