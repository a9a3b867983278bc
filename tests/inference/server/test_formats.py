"""Number formats and memory of `etude serve`'s engine: what is chosen by options, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.cli.served_model import EngineChoice, OpenedModel, open_checkpoint
from etude.errors import ResourceError, UserError
from etude.inference.cache import page_bytes
from etude.model import build_model
from etude.model.huggingface import save_model
from etude.tokens import Tokenizer
from tests.cli.commands import etude
from tests.inference.builders import needs_compiler
from tests.inference.server.checkpoint import write_checkpoint
from tests.model.builders import small_config

MIB = 1 << 20


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    directory = write_checkpoint(tmp_path_factory.mktemp("formats") / "tiny")
    return open_checkpoint(directory, None, ("auto", "auto"), None, 64)


def choice(kernels: str = "eager", cache_bytes: int = MIB, **formats: Any) -> EngineChoice:
    return EngineChoice(4, cache_bytes, kernels, 0, **formats)


def test_the_same_memory_holds_twice_the_tokens_in_bfloat16(opened: OpenedModel) -> None:
    config = opened.weights.config
    memory = 40 * page_bytes(config)
    pages = [
        choice(cache_bytes=memory, cache_dtype=dtype).make(opened).num_pages for dtype in ("auto", "bfloat16")
    ]
    assert pages == [40, memory // page_bytes(config, "bfloat16")]


def test_the_engine_has_all_rows_of_a_padded_vocabulary(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tiny")
    num_rows = Tokenizer.load(directory).vocab_size + 61
    model = build_model(small_config(max_positions=600), num_rows)
    model.initialise(0)
    save_model(model, directory)
    assert (
        choice().make(open_checkpoint(directory, None, ("auto", "auto"), None, 64)).model.vocab_size
        == num_rows
    )


@needs_compiler
def test_native_matrices_may_be_bfloat16(opened: OpenedModel) -> None:
    assert choice("native", weight_dtype="bfloat16").make(opened).num_pages


@needs_compiler
@pytest.mark.parametrize(
    ("kernels", "formats", "field", "fix"),
    [
        ("native", {"cache_dtype": "bfloat16"}, "--cache-dtype", "--kernels eager"),
        ("auto", {"cache_dtype": "bfloat16"}, "--cache-dtype", "--kernels eager"),
        ("eager", {"weight_dtype": "bfloat16"}, "--weight-dtype", "auto"),
        ("gpu", {}, "--kernels", "--kernels auto"),
    ],
)
def test_what_kernels_do_not_have_is_refused_by_the_options_name(
    kernels: str, formats: dict[str, Any], field: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        choice(kernels, **formats).choose_place()
    assert caught.value.field == field
    assert fix in (caught.value.fix or "")


@needs_compiler
def test_a_refusal_comes_before_the_model_is_read() -> None:
    done = etude("serve", "/no/model/at/all", "--cache-dtype", "bfloat16", "--kernels", "native")
    assert done.exit_code != 0
    assert "--cache-dtype: native kernels hold keys and values in float32" in " ".join(done.stderr.split())
    done = etude("serve", "/no/model/at/all", "--weight-dtype", "float16")
    assert "'float16' is not one of 'auto', 'float32'," in " ".join(done.stderr.split())


def test_memory_for_less_than_one_context_is_refused_with_what_it_takes(opened: OpenedModel) -> None:
    for pages in (0, 1):
        with pytest.raises(ResourceError, match="do not fit") as caught:
            choice(cache_bytes=pages * page_bytes(opened.weights.config) + 1).make(opened)
        assert caught.value.field == "--cache-mib"
        assert "MiB or more" in (caught.value.fix or "")
