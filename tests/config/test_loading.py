import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import (
    ClusterConfig,
    PartConfig,
    PretrainConfig,
    RewardConfig,
    RlConfig,
    RunConfig,
    SessionsConfig,
    SftConfig,
    SourceConfig,
    StageConfig,
    StreamConfig,
    TasksConfig,
    dump_config,
    load_config,
    parse_config,
)
from etude.errors import ConfigError

ROOT = Path(__file__).parents[2]
ROUTERS = (ROOT / "configs" / "router.toml",)
"""Files of `etude route`; tests/config/test_routing.py loads them."""
CONFIGS = sorted(set((ROOT / "configs").rglob("*.toml")) - set(ROUTERS))

positive = st.floats(min_value=1e-12, max_value=1.0)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
trees = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True),
        "runs_directory": texts,
        "initial_checkpoint": st.none() | texts,
        "seed": st.integers(0, 2**31 - 1),
        "max_wall_s": st.floats(0, 1e300),
        "engine": st.fixed_dictionaries({}, optional={"num_slots": st.integers(1, 10**12)}),
        "sandbox": st.fixed_dictionaries(
            {}, optional={"backend": st.sampled_from(["local", "unisolated"]), "test_timeout_s": positive}
        ),
        "midtrain": st.fixed_dictionaries(
            {},
            optional={"optimizer": st.fixed_dictionaries({}, optional={"learning_rate": positive})},
        ),
        "rl": st.fixed_dictionaries(
            {},
            optional={
                "baseline": st.sampled_from(["group_mean", "group_mean_std", "leave_one_out"]),
                "level_weights": st.lists(positive, min_size=3, max_size=3),
                "loss": st.fixed_dictionaries({}, optional={"kind": st.sampled_from(["cispo", "clip"])}),
            },
        ),
    },
)


@given(trees)
def test_what_is_dumped_loads_equal(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:
    config = parse_config(tree)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_every_field_is_dumped() -> None:
    tasks = TasksConfig(trail_lengths_at_end=(10, 100))
    rl = RlConfig(stream=StreamConfig(max_step=3), reward=RewardConfig(custom={"own.terms:tidy": 0.5}))
    stages = {"long": StageConfig(from_step=3, window=4096)}
    pretrain = PretrainConfig(sources={"code": SourceConfig(path="x.jsonl")}, stages=stages)
    sft = SftConfig(sources={"own": SessionsConfig(path="runs/x", min_reward=0.5)})
    part = PartConfig(gpus=0.5)
    cluster = ClusterConfig(trainer=part, engine=part, worker=part, evaluation=part)
    config = RunConfig(
        initial_checkpoint="x", tasks=tasks, rl=rl, pretrain=pretrain, sft=sft, cluster=cluster
    )
    assert tomllib.loads(dump_config(config)) == config.model_dump(mode="json")


@pytest.mark.parametrize("name", ["token_high", "sequence_high"])
def test_an_upper_bound_of_a_ratio_lets_equals_pass(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_config({"rl": {"loss": {"correction": {name: 0.9}}}})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    config = load_config(path)
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("seed = 3\n[rl]\nnum_steps = 5\ngroup_size = 4\n")
    config = load_config(
        path, ["rl.num_steps=9", "rl.loss.kind=clip", "name = other", "rl.level_weights=[1,0,2]"]
    )
    assert (config.seed, config.rl.num_steps, config.rl.group_size) == (3, 9, 4)
    assert (config.rl.loss.kind, config.name, config.rl.level_weights) == ("clip", "other", (1.0, 0.0, 2.0))
    assert config.rl.groups_per_step == RunConfig().rl.groups_per_step


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        load_config(overrides=overrides)
    return raised.value


@pytest.mark.parametrize(
    ("override", "field", "suggestion"),
    [
        ("sed=1", "sed", "seed"),
        ("rl.num_step=1", "rl.num_step", "num_steps"),
        ("rl.optimizer.learning_rat=1", "rl.optimizer.learning_rat", "learning_rate"),
        ("sandbx.backend=local", "sandbx", "sandbox"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(override: str, field: str, suggestion: str) -> None:
    error = refused(override)
    assert error.field == field
    assert error.fix == f"did you mean {suggestion}?"


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("rl.num_steps=three", f"rl.num_steps is {RunConfig().rl.num_steps} by default"),
        ("rl.loss.kind=none", 'rl.loss.kind is "'),
        ("rl.level_weights=[1,-1]", "rl.level_weights is [1.0, 1.0, 1.0] by default"),
        ("rl.level_weights=[1,x,1]", "rl.level_weights is [1.0, 1.0, 1.0] by default"),
        ("initial_checkpoint=3", "leave it out"),
        ("seed=[]", "seed is 0 by default"),
    ],
)
def test_a_value_that_does_not_do_is_answered_with_the_default(override: str, fix: str) -> None:
    assert fix in (refused(override).fix or "")


def test_a_key_like_no_other_is_answered_with_the_known_keys() -> None:
    assert "matrix_optimizer" in (refused("rl.optimizer.zzz=1").fix or "")


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("seed=-1", "seed"),
        ("seed=text", "seed"),
        ("max_wall_s=inf", "max_wall_s"),
        ("max_wall_s=nan", "max_wall_s"),
        ("name=../elsewhere", "name"),
        ("name=.", "name"),
        ("rl.group_size=1", "rl.group_size"),
        ("rl.loss.kind=ppo", "rl.loss.kind"),
        ("rl.level_weights=[1,1]", "rl.level_weights.2"),
        ("model.hidden_size=1.5", "model.hidden_size"),
    ],
)
def test_impossible_values_are_refused_by_field(override: str, field: str) -> None:
    error = refused(override)
    assert error.field == field
    assert error.received is not None or field.startswith("rl.level_weights")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.num_heads=6", "model.num_kv_heads=4"), "num_kv_heads: must divide num_heads=6"),
        (("model.head_dim=31",), "head_dim: must be even"),
        (("model.experts_per_token=9",), "experts_per_token: must be at most num_experts=8"),
        (("agent.max_tokens=2000",), "agent.max_tokens: must be at most model.max_positions"),
        (("agent.max_message_tokens=640", "agent.max_tokens=640"), "agent.max_message_tokens: must be under"),
        (("agent.summary_at_tokens=560",), "agent.summary_at_tokens: must leave 193 of agent.max_tokens=640"),
        (("elastic.hours=09:00-09:00",), "hours: must begin and end at different times"),
        (("engine.drafts=mtp",), "speculative_tokens: must be 1 or more with drafts"),
        (("engine.kernels=native", "engine.cache_dtype=bfloat16"), "cache_dtype: native kernels hold"),
        (("rl.updates_per_step=13",), "updates_per_step: must be at most groups_per_step=12"),
        (("agent.mcp.a.command=it's", "agent.mcp.a.where=host"), "command: No closing quotation"),
        (
            ("agent.mcp.a.url=http://h", "agent.mcp.a.where=host"),
            "env, where: apply only to a server that is started",
        ),
        (("rl.level_weights=[0,0,0]",), "level_weights: must be >= 0 and not all 0"),
        (("rl.level_weights=[1,-1,2]",), "level_weights: must be >= 0 and not all 0"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(overrides: tuple[str, ...], words: str) -> None:
    assert words in str(refused(*overrides))


@pytest.mark.parametrize("override", ["seed", "=1", "", "seed.x=1"])
def test_a_malformed_override_is_refused(override: str) -> None:
    assert isinstance(refused("seed=1", override), ConfigError)


def test_a_missing_file_and_bad_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    for content in (b"seed = \n", b"\xff\xfe"):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match="not valid TOML"):
            load_config(bad)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("weights", [{"scratch": "/scratch"}, {"url": "/store", "scratch": "scratch"}])
def test_a_scratch_directory_that_would_be_ignored_or_depends_on_the_place_is_refused(weights: dict) -> None:
    assert parse_config({"weights": {"url": "/store", "scratch": "/scratch"}}).weights.scratch
    with pytest.raises(ConfigError, match="scratch"):
        parse_config({"weights": weights})
