"""Models that run in this process for `etude agent`. Their output is noise; tests check that they run."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from etude.agent import AgentSession, core_registry
from etude.agent.endpoint_messages import byte_tokenizer
from etude.agent.journal import replay
from etude.config import ModelConfig, parse_config
from etude.controller.agent.conversation import Frontend, open_conversation
from etude.controller.agent.folders import SessionFolder
from etude.controller.agent.models import ModelChoice, open_policy
from etude.controller.agent.trees import DirectoryTree
from etude.errors import CheckpointError, ConfigError, StoreError, UserError
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.observe import RunDirectory
from etude.protocols import Sample
from etude.records import Status, TrajectoryId
from etude.tokens import CHATML_TEMPLATE, Tokenizer, train_tokenizer
from etude.tokens.grammar import XmlGrammar
from etude.training import save_checkpoint
from etude_quickstart.memory_backend import MemoryBackend
from tests.controller.agent_builders import make_repository

SMALL = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=2, expert_size=8
)


def etude_tokenizer() -> Tokenizer:
    return byte_tokenizer(XmlGrammar(core_registry().schemas).control_tokens())


def small_model(tokenizer: Tokenizer, max_positions: int = 768, num_padding: int = 0) -> LanguageModel:
    num_rows = tokenizer.vocab_size + num_padding
    model = LanguageModel(SMALL.model_copy(update={"max_positions": max_positions}), num_rows)
    model.initialise(0)
    return model


def trained_run(root: Path) -> RunDirectory:
    tokenizer = etude_tokenizer()
    settings = {"model": SMALL.model_dump(), "runs_directory": str(root / "runs"), "name": "demo"}
    run = RunDirectory.create(parse_config(settings))
    save_checkpoint(run.checkpoints / "final", small_model(tokenizer), write_more=tokenizer.save)
    return run


def speak(root: Path, choice: ModelChoice) -> tuple[Status, str, np.ndarray]:
    """One prompt; how it ended, by whom it was sampled, and its tokens."""
    make_repository(root / "repo")

    async def go() -> tuple[Status, str, np.ndarray]:
        async with asyncio.timeout(60), open_policy(choice, one_shot=True) as policy:
            tree = DirectoryTree(root / "repo")
            folder = SessionFolder.create(root / "sessions", tree.root, choice.to_dict(), "full")
            face = Frontend(lambda event: None)
            async with open_conversation(folder, tree, policy, MemoryBackend(), face, "full") as conversation:
                outcome = await conversation.say("hello")
            session, _ = replay(folder.journal, policy.renderer)
            spans = session.recording.version_spans
            return outcome.status, spans[0].version.lineage, session.recording.tokens

    return asyncio.run(go())


@pytest.mark.slow
@pytest.mark.parametrize("num_padding", [0, 61])
def test_a_checkpoint_directory_is_a_model(tmp_path: Path, num_padding: int) -> None:
    tokenizer, directory = etude_tokenizer(), tmp_path / "checkpoint"
    save_model(small_model(tokenizer, num_padding=num_padding), directory)
    tokenizer.save(directory)
    status, lineage, tokens = speak(tmp_path, ModelChoice(model=str(directory)))
    assert (status, lineage) == (Status.LIMIT, "checkpoint")
    assert len(tokens) > 20


@pytest.mark.slow
def test_a_foreign_checkpoint_is_told_its_tools(tmp_path: Path) -> None:
    tokenizer = train_tokenizer((), 300, CHATML_TEMPLATE.control_tokens)
    directory = tmp_path / "foreign"
    save_model(small_model(tokenizer, 16_384), directory)
    tokenizer.save(directory)
    _, _, tokens = speak(tmp_path, ModelChoice(model=str(directory), tools="read_file,finish"))
    assert "<tool_call>" in tokenizer.decode(tokens)
    assert '"name": "read_file"' in tokenizer.decode(tokens)
    save_model(small_model(tokenizer, 512), directory)
    with pytest.raises(ConfigError, match="fill half") as refused:
        speak(tmp_path / "again", ModelChoice(model=str(directory), tools="read_file,finish"))
    assert refused.value.field == str(directory), "whichever command named it, and however"


def test_a_runs_model_works_with_the_runs_limits(tmp_path: Path) -> None:
    run = trained_run(tmp_path)
    status, lineage, _ = speak(tmp_path, ModelChoice(run=str(run.path)))
    assert (status, lineage) == (Status.LIMIT, "demo")
    with pytest.raises(ConfigError, match="trained with index 'none'"):
        speak(tmp_path / "other", ModelChoice(run=str(run.path), index="words"))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json"):
        speak(tmp_path / "a", ModelChoice(model=str(tmp_path)))
    tokenizer = etude_tokenizer()
    save_model(small_model(tokenizer), tmp_path / "half")
    with pytest.raises(UserError):
        speak(tmp_path / "b", ModelChoice(model=str(tmp_path / "half")))
    tokenizer.save(tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        speak(tmp_path / "c", ModelChoice(model=str(tmp_path / "half")))


def test_a_choice_is_kept_with_its_session(tmp_path: Path) -> None:
    choice = ModelChoice(endpoint="http://h/v1", model_name="m", key_variable="KEY", temperature=0.5)
    assert ModelChoice.from_dict(choice.to_dict()) == choice
    assert ModelChoice.from_dict({**choice.to_dict(), "script": ""}) == choice, "as earlier versions wrote it"
    assert Path(ModelChoice(model="x").to_dict()["model"]).is_absolute()
    with pytest.raises(StoreError):
        ModelChoice.from_dict({"nonsense": 1})
    with pytest.raises(ConfigError, match="too small"):
        ModelChoice(model="x", context_tokens=5)


@pytest.mark.parametrize("context_tokens", [2048, 8192, 128_000, 1_000_000])
@pytest.mark.parametrize("native", [True, False])
def test_limits_of_an_endpoint_fit_each_other(context_tokens: int, native: bool) -> None:
    choice = ModelChoice(
        endpoint="http://127.0.0.1:9/v1",
        model_name="m",
        native_tools=native,
        context_tokens=context_tokens,
        tools="read_file,finish",
    )

    async def go() -> None:
        async with open_policy(choice, one_shot=True) as policy:
            identity = TrajectoryId("r", "t", 0, 0, 0)
            made = policy.renderer, identity, policy.limits, policy.params, policy.system, policy.summary
            session = AgentSession("hello", *made)
            assert isinstance(session.next_action(), Sample)

    asyncio.run(go())
