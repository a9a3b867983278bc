import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from etude.cli.app import app
from etude.config import AdapterConfig, ModelConfig, RunConfig, load_config, parse_config
from etude.controller.compute import Place
from etude.controller.planning import check_fits, check_machine, make_plan
from etude.controller.planning.memory import plan_memory
from etude.controller.planning.sizes import _KeptAttention, measure_sizes
from etude.controller.starting import check_start
from etude.errors import ConfigError, ResourceError
from etude.model import build_model
from etude.model.loading import load_any_model
from etude.model.lora import Adapters
from etude.training.optimizer import Optimizer
from tests.controller.test_vllm_run import checkpoint, small_model

SUPPOSED = {"device_memory_gb": 1.0, "peak_tflops": 1.0, "bandwidth_gb_per_s": 10.0}
DENSE = ModelConfig(architecture="qwen3", hidden_size=64, num_layers=2, head_dim=16, intermediate_size=128)


def planned(**sections) -> RunConfig:
    sections["plan"] = SUPPOSED | sections.get("plan", {})
    return parse_config({"num_threads": 1} | sections)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_parameters_are_those_of_the_model_itself(architecture: str) -> None:
    config = ModelConfig.model_validate({"architecture": architecture})
    model = build_model(config, 512)
    sizes = measure_sizes(config, 512, 256, 64)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    inactive = sizes.parameters - sizes.active_parameters
    routed = config.num_moe_layers * 3 * config.hidden_size * config.expert_size * config.num_experts
    assert sizes.expert_parameters == (routed if config.num_moe_layers else 0)
    expected = sizes.expert_parameters * (1 - config.experts_per_token / config.num_experts)
    assert inactive == pytest.approx(expected, abs=1)


def test_a_checkpoint_is_planned_with_all_rows_that_it_has(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", lambda num_tokens: small_model(num_tokens + 61))
    agent = {"max_tokens": 512, "max_message_tokens": 128}
    plan = make_plan(planned(initial_checkpoint=str(initial), agent=agent))
    assert plan.sizes.parameters == sum(one.numel() for one in load_any_model(initial).parameters())


def test_products_per_token_are_two_per_weight_and_grow_with_the_context() -> None:
    sizes = measure_sizes(DENSE, 512, 64, 64)
    assert sizes.forward_flops(0) == 2 * sizes.parameters
    assert sizes.forward_flops(0, with_head=False) == 2 * (sizes.parameters - 512 * 64)
    per_position = 2 * 2 * DENSE.num_layers * DENSE.num_heads * DENSE.head_dim
    assert sizes.forward_flops(10) - sizes.forward_flops(0) == 10 * per_position


def test_what_is_kept_grows_with_the_tokens_and_checkpointing_keeps_little() -> None:
    short, long = (measure_sizes(DENSE, 512, tokens, 64).saved_bytes for tokens in (512, 1024))
    assert long == pytest.approx(2 * short, rel=0.05)
    checkpointed = measure_sizes(DENSE, 512, 1024, 64, checkpointed=True).saved_bytes
    assert checkpointed < 0.3 * long


def test_what_is_kept_is_about_what_a_real_step_keeps() -> None:
    """On a CPU, where the same code runs with contents."""
    from etude.model.scoring import PackedSequences, packed_logprobs

    model = build_model(DENSE, 512)
    model.initialise(0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    import numpy as np

    batch = PackedSequences.pack([np.full(64, token, dtype=np.int32) for token in range(8)])
    targets = torch.tensor([row for row in range(512) if row % 64])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = packed_logprobs(model, batch, targets)
    assert result[0].requires_grad
    counted = measure_sizes(DENSE, 512, 512, 64, on_cpu=True).saved_bytes
    assert sum(kept.values()) == pytest.approx(counted, rel=0.2), "without native kernels 15 % more"


def test_memory_adds_up_to_what_the_parts_really_take() -> None:
    config = planned(model=DENSE.model_dump(), tokenizer={"vocab_size": 512})
    plan = make_plan(config)
    parts = {part.name: part.num_bytes for memory in plan.memory for part in memory.parts}
    model = build_model(DENSE, 512)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert parts["weights"] == parts["gradients"] == weights
    optimizer = Optimizer(model, config.rl.optimizer, 10)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = sum(_bytes(value) for value in optimizer.state_dict().values())
    assert parts["optimizer"] == pytest.approx(states, rel=0.01)
    assert plan.memory[0].total_bytes == pytest.approx(1.05 * sum(parts.values()))


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.numel() > 1 else 0
    if isinstance(value, dict):
        return sum(_bytes(inner) for inner in value.values())
    return 0


def test_each_thread_that_trains_has_a_micro_batch_and_its_gradients() -> None:
    rl = {"groups_per_step": 4, "group_size": 4, "updates_per_step": 1, "micro_batch_tokens": 1024}
    sections = {"rl": rl, "agent": {"max_tokens": 512, "max_message_tokens": 128}}
    one = parts_of(**sections)
    two, many, ranks = (
        parts_of(**sections, **changes)
        for changes in ({"num_threads": 2}, {"num_threads": 64}, {"num_threads": 2, **RANKS})
    )
    for name in ("activations", "logits"):
        assert two[name] == 2 * one[name], name
        assert many[name] == 8 * one[name], f"{name}: a step has no more tokens"
    assert (two["gradients"], many["gradients"]) == (3 * one["weights"], 9 * one["weights"])
    assert ranks["activations"] == 2 * one["activations"], "ranks do not share them with threads"


def test_adapters_take_states_of_their_own_size_and_the_engine_one_set_of_weights() -> None:
    adapter = {"rank": 4}
    plan = make_plan(planned(model=DENSE.model_dump(), rl={"adapter": adapter}))
    adapters = Adapters(build_model(DENSE, 1024), AdapterConfig(rank=4))
    assert plan.sizes.adapter_parameters == sum(p.numel() for p in adapters.parameters())
    parts = {part.name: part.num_bytes for part in plan.memory[0].parts}
    assert parts["optimizer"] == 2 * 4 * sum(p.numel() for p in adapters.parameters())
    assert parts["gradients"] == parts["optimizer"] / 2
    full = make_plan(planned(model=DENSE.model_dump()))
    served = {part.name: part.num_bytes for part in full.memory[0].parts}["engine's weights"]
    assert parts["engine's weights"] == served / 2


def test_adapters_of_16_bits_keep_what_they_multiply_in_float32_as_well() -> None:
    adapter = AdapterConfig(rank=4)
    model = build_model(DENSE, 512)
    model.initialise(0)
    model.to(torch.bfloat16)
    adapters = Adapters(model, adapter)
    weights = {p.untyped_storage().data_ptr() for part in (model, adapters) for p in part.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, wanted = torch.zeros(64, dtype=torch.int64), torch.arange(63)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(tokens, torch.arange(64), _KeptAttention(), None, None, wanted=wanted)
        _kept_as_well = model.logprobs(hidden, tokens[wanted], 1.0)
    sizes = measure_sizes(DENSE, 512, 64, 64, dtype=torch.bfloat16, adapter=adapter)
    assert 0.9 * sizes.saved_bytes < sum(kept.values()) <= sizes.saved_bytes


RANKS = {"parallel": {"ranks": 2}}
SPREAD = {"executor": "ray", "cluster": {"address": "10.0.0.1:6379"}}
"""Processes on machines of their own."""


def test_ranks_share_weights_and_parts_apart_have_devices_of_their_own() -> None:
    alone = make_plan(planned())
    cut = make_plan(planned(parallel={"ranks": 4, "fsdp": 2, "expert": 2}, **SPREAD))
    assert [(memory.device, memory.count) for memory in alone.memory] == [("machine", 1)]
    assert [(memory.device, memory.count) for memory in cut.memory] == [("trainer", 4), ("engine", 1)]
    weights = [plan.memory[0].parts[0].num_bytes for plan in (alone, cut)]
    assert weights[0] / 4 < weights[1] < weights[0] / 2
    assert (alone.processes.devices, cut.processes.devices) == (1, 5)


def test_sampling_beside_training_takes_as_long_as_the_slower() -> None:
    rl = {"max_staleness": 1}
    beside = make_plan(planned(rl=rl, **SPREAD)).step
    waiting = make_plan(planned(rl=rl | {"overlap_publication": False}, **SPREAD)).step
    in_turns = make_plan(planned(**SPREAD)).step
    publication = beside.publication
    assert beside.overlapped and not waiting.overlapped
    assert beside.training_side_s == max(beside.train_s + publication.held_s, publication.total_s)
    assert waiting.training_side_s == waiting.train_s + publication.total_s > beside.training_side_s
    assert beside.step_s == max(beside.sampled.wall_s, beside.training_side_s)
    all_in_turns_s = in_turns.sampled.wall_s + in_turns.train_s + publication.total_s + in_turns.validation_s
    assert in_turns.step_s == all_in_turns_s


def test_looks_at_validation_tasks_take_their_part_of_a_step() -> None:
    every = [{"reward": {"price": {"validate_every": steps}}} for steps in (0, 20, 1)]
    none, some, much = (make_plan(planned(rl=rl, **SPREAD)).step for rl in every)
    assert none.validation_s == 0 < some.validation_s < much.validation_s
    assert some.step_s == pytest.approx(none.step_s + some.validation_s)


def test_processes_on_the_same_cores_gain_only_what_sessions_wait_for_tools() -> None:
    rl = {"max_staleness": 2}
    beside = make_plan(planned(executor="ray", rl=rl)).step
    in_turns = make_plan(planned(executor="ray")).step
    assert beside.shares_cores and not make_plan(planned(rl=rl, **SPREAD)).step.shares_cores
    saved = in_turns.step_s - beside.step_s
    assert 0 < saved <= in_turns.sampled.tools_s + 0.1 * in_turns.step_s


def parts_of(**sections) -> dict[str, float]:
    """Bytes of one process, by the name of the part."""
    memory = make_plan(planned(**sections)).memory
    return {part.name: part.num_bytes for plan in memory for part in plan.parts}


def test_ranks_publish_their_own_parts_to_a_store_and_gather_the_model_without_one(tmp_path) -> None:
    ranks = {"parallel": {"ranks": 4, "fsdp": 4}}
    gathered = parts_of(**ranks, **SPREAD)
    store = {"url": str(tmp_path), "dtype": "bfloat16"}
    parts = parts_of(**ranks, **SPREAD, weights=store)
    alone = parts_of(**SPREAD, weights=store)
    assert gathered["gathered weights"] == pytest.approx(4 * gathered["weights"])
    assert "gathered weights" not in parts and "gathered weights" not in alone
    assert parts["published weights"] == pytest.approx(alone["published weights"] / 4)
    assert alone["published weights"] == alone["fetched weights"] == alone["weights"]  # twice, in 2 bytes
    whole, cut = (
        make_plan(planned(parallel=parallel, weights=store, **SPREAD)).step.publication
        for parallel in ({}, ranks["parallel"])
    )
    assert cut.held_s == pytest.approx(whole.held_s / 4) and cut.travel_s < whole.travel_s
    assert cut.update_bytes == whole.update_bytes


def test_tensor_parallel_ranks_hold_a_part_of_every_weight() -> None:
    alone, cut = parts_of(**SPREAD), parts_of(parallel={"ranks": 2, "tensor": 2}, **SPREAD)
    for name in ("weights", "gradients", "optimizer", "logits"):
        assert cut[name] == alone[name] / 2, name
    assert cut["gathered weights"] == alone["weights"]


def test_a_store_takes_longer_than_a_copy_and_less_of_the_link() -> None:
    slow = {"network_gb_per_s": 0.01, "link_gb_per_s": 0.001}
    store = {"url": "memory://run", "dtype": "bfloat16"}
    directory = make_plan(planned(plan=slow, **SPREAD)).step.publication
    delta = make_plan(planned(plan=slow, weights=store, **SPREAD)).step.publication
    assert delta.update_bytes == directory.update_bytes / 2 / 20
    assert delta.total_s < directory.total_s
    clusters = {"listen": "127.0.0.1:8680"}
    over_link = make_plan(planned(plan=slow, weights=store, clusters=clusters, **SPREAD)).step.publication
    assert over_link.total_s == pytest.approx(delta.total_s + delta.update_bytes / 1e6)


def test_rollout_workers_take_agents_off_one_process_and_have_a_price() -> None:
    slow_agents = {"turn_cpu_s": 1.0, "worker_price_per_hour": 0.5, "price_per_hour": 2.0}
    alone = make_plan(planned(plan=slow_agents, **SPREAD))
    spread = {**SPREAD, "cluster": {**SPREAD["cluster"], "workers": 4}}
    workers = make_plan(planned(plan=slow_agents, **spread))
    assert workers.step.sampled.turns_s == alone.step.sampled.turns_s / 4
    assert alone.price_per_step == pytest.approx(2 * 2.0 * alone.step.step_s / 3600)
    assert workers.price_per_step == pytest.approx((2 * 2.0 + 4 * 0.5) * workers.step.step_s / 3600)


def test_evaluation_beside_training_has_an_engine_and_may_be_too_slow() -> None:
    seldom = make_plan(planned(evaluation={"every_steps": 50}, **SPREAD))
    often = make_plan(planned(evaluation={"every_steps": 1, "num_tasks": 4000}, **SPREAD))
    assert [memory.device for memory in seldom.memory] == ["trainer", "engine", "evaluation"]
    assert seldom.memory[1].parts == seldom.memory[2].parts
    assert seldom.processes.devices == 3
    assert not seldom.step.left_out and often.step.left_out
    shared = {"executor": "ray"}
    without, beside = (
        make_plan(planned(evaluation=evaluation, **shared)).step
        for evaluation in ({}, {"every_steps": 2, "num_tasks": 240})
    )
    assert beside.step_s == pytest.approx(without.step_s + beside.evaluation_s / 2), "it has the same cores"


def test_borrowed_replicas_sample_in_their_hours_and_other_clusters_instead_of_the_runs_engines() -> None:
    store = {"weights": {"url": "memory://run"}}
    prices = {"price_per_hour": 2.0, "borrowed_price_per_hour": 1.0}
    alone = make_plan(planned(plan=prices, **store, **SPREAD))
    elastic = {"router": "http://127.0.0.1:8670", "most": 2, "hours": "22:00-04:00"}
    lent = make_plan(planned(plan=prices, elastic=elastic, **store, **SPREAD))
    assert lent.processes.borrowed == pytest.approx(2 * 6 / 24)
    assert lent.step.sampled.prefill_s == pytest.approx(alone.step.sampled.prefill_s / 1.5)
    assert lent.price_per_step == pytest.approx((2 * 2.0 + 0.5) * lent.step.step_s / 3600)
    clusters = {"listen": "127.0.0.1:8680"}
    elsewhere = make_plan(planned(plan=prices | {"cluster_engines": 3}, clusters=clusters, **store))
    here = make_plan(planned(plan=prices, **store))
    assert elsewhere.processes.devices == here.processes.devices + 3
    assert elsewhere.step.sampled.prefill_s == pytest.approx(here.step.sampled.prefill_s / 3)
    some = clusters | {"local_sessions": 256}
    both = make_plan(planned(plan=prices | {"cluster_engines": 3}, clusters=some, **store))
    assert both.step.sampled.prefill_s == pytest.approx(here.step.sampled.prefill_s / 4)


def test_what_does_not_fit_is_told_with_its_largest_part_and_a_fix() -> None:
    plan = make_plan(planned(plan={"device_memory_gb": 0.1}, engine={"num_slots": 4096}))
    assert not plan.fits
    with pytest.raises(ResourceError, match=r"needs \d+\.\d GB, and only 0\.1 GB are") as failed:
        check_fits(plan.config, plan.memory)
    assert failed.value.field == "keys and values"
    assert failed.value.fix is not None and "cache_tokens lower (a GB holds " in failed.value.fix
    assert ";" in failed.value.fix, "less of that alone would not do"
    small = make_plan(planned())
    check_fits(small.config, small.memory)


def test_processes_that_share_a_machine_must_fit_it_together() -> None:
    place = Place("cpu", "float32", "native")

    def parts_of(**sections) -> dict[str, float]:
        config = planned(**sections)
        sizes = make_plan(config).sizes
        (machine,) = plan_memory(config, sizes, 1024, place, 1e9, process_bytes=1e6)
        return {part.name: part.num_bytes for part in machine.parts}

    alone = parts_of()
    apart = parts_of(executor="ray", cluster={"engines": 3, "workers": 2}, evaluation={"every_steps": 1})
    ranked = parts_of(parallel={"ranks": 2})
    assert apart["keys and values"] == 4 * alone["keys and values"], "evaluation has an engine too"
    assert apart["optimizer"] == alone["optimizer"] == ranked["optimizer"] / 2
    assert ranked["processes"] == 1e6, "the one that plans is there already"
    assert 5e6 < apart["processes"] < 6e6, "and rollout workers take less than half of what others do"
    assert alone["packed weights"] == pytest.approx(alone["engine's weights"], rel=0.01)
    recorded = parts_of(rl={"stream": {"source": "runs/x"}})
    engines = {"engine's weights", "packed weights", "keys and values", "published weights"}
    assert set(alone) - set(recorded) == engines


def test_a_run_that_does_not_fit_this_machine_is_refused_before_it_has_a_directory() -> None:
    place = Place("cpu", "float32", "native")
    large = parse_config({"engine": {"num_slots": 1 << 22}, "plan": {"device_memory_gb": 1e6}})
    with pytest.raises(ResourceError, match="the machine needs") as failed:
        check_machine(large, place)
    assert failed.value.field == "keys and values", "what [plan] supposes is not asked"
    check_machine(parse_config({}), place)
    elsewhere = {"executor": "ray", "cluster": {"address": "10.0.0.1:6379"}}
    check_machine(parse_config({"engine": {"num_slots": 1 << 22}, **elsewhere}), place)
    with pytest.raises(ResourceError, match="the machine needs"):
        check_start(large)
    check_start(large.model_copy(update={"plan": large.plan.model_copy(update={"enforce": False})}))


def test_experts_that_cannot_be_divided_as_asked_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.expert: must divide the number of experts, which is 8"):
        make_plan(parse_config({"parallel": {"ranks": 3, "expert": 3}}))


def test_a_gpu_that_is_not_here_must_be_described() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="no GPU to measure") as failed:
        make_plan(planned(device="cuda", plan={"peak_tflops": 0.0}))
    assert failed.value.field == "plan.peak_tflops"


def test_rates_that_are_not_given_are_measured_and_named() -> None:
    rates = make_plan(parse_config({"plan": {"peak_tflops": 1.0}})).rates
    assert rates.measured == ("memory", "bandwidth")
    assert rates.flops_per_s == 1e12 and rates.bytes_per_s > 1e8


@pytest.mark.slow
def test_qwen3_4b_with_adapters_fits_one_gpu_of_80_gb() -> None:
    plan = make_plan(load_config(Path("configs/qwen3-4b-1gpu.toml"), []))
    assert plan.sizes.parameters == 4_022_468_096  # as published
    assert plan.fits
    full = plan.config.model_copy(
        update={"rl": plan.config.rl.model_copy(update={"adapter": AdapterConfig()})}
    )
    assert make_plan(full).fits, "they take turns"
    assert not make_plan(full.model_copy(update={"colocated": False})).fits


def test_who_takes_turns_holds_the_larger_part_and_not_the_sum() -> None:
    apart = make_plan(planned()).memory[0]
    turns = {memory.device: memory for memory in make_plan(planned(colocated=True)).memory}
    sampling, training, updating = (
        turns[f"trainer and engine, {phase}"] for phase in ("sampling", "training", "updating weights")
    )
    assert all(memory.total_bytes < apart.total_bytes for memory in turns.values())
    names = {device: {part.name for part in memory.parts} for device, memory in turns.items()}
    every = {part.name for part in apart.parts}
    assert every - names[sampling.device] == {"gradients", "activations", "logits"}, "on a CPU states stay"
    assert every - names[training.device] == {"keys and values"}
    served = [
        next(part.num_bytes for part in memory.parts if part.name == "engine's weights")
        for memory in (sampling, training, updating)
    ]
    assert served[0] == served[1] == served[2] / 2
    gpu = {**SUPPOSED, "device_memory_gb": 1.0}
    there = make_plan(planned(colocated=True, device="cuda", plan=gpu)).memory[0]
    assert "optimizer" not in {part.name for part in there.parts}


def test_the_command_prints_tables_or_json_and_fails_where_it_does_not_fit(tmp_path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        "num_threads = 1\n[plan]\ndevice_memory_gb = 1\npeak_tflops = 1\nbandwidth_gb_per_s = 10\n"
        "price_per_hour = 2\n"
    )
    runner = CliRunner()
    shown = runner.invoke(app, ["plan", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "memory of the machine" in shown.output and "a step" in shown.output
    document = json.loads(runner.invoke(app, ["plan", str(path), "--json"]).output)
    assert document["fits"] is True
    assert document["step"]["step_s"] == pytest.approx(make_plan(load_config(path, [])).step.step_s)
    refused = runner.invoke(app, ["plan", str(path), "--set", "plan.device_memory_gb=0.01"])
    assert refused.exit_code != 0
    assert "DOES NOT FIT" in refused.output
