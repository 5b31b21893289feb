"""`hybridrl plan` of placements: which ranks hold what, memory and traffic by hand, the words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from hybridrl.config.load import load_config_dict
from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.models.families import llama
from hybridrl.models.weights import NOTHING, hf_layout, hf_shapes, megatron_layouts
from hybridrl.parallel.host_gpus import Host, local_gpu_names
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.hardware import ClusterFile
from hybridrl.services.planner.phase_memory import GRAPH_BYTES, GROUP_BYTES
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text
from hybridrl.services.planner.text import memory_size

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 256,
}
NORMS = 2 * 64  # of a layer
MATRICES = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64  # of a layer
EMBEDDING = 256 * 64
WHOLE = 4 * (MATRICES + NORMS) + 64 + 2 * EMBEDDING
HALF = 4 * (MATRICES // 2 + NORMS) + 64 + EMBEDDING  # of two tensor-parallel ranks
PER_TOKEN = 4 * 64 + 2 * (4 + 2) * 16 + 3 * 96  # of a layer; see planning.memory._pass_bytes
TOKENS, SAMPLES, LONGEST = 1024, 64, 64  # a replica has more samples than fit a micro-batch
HEAD = 6 * TOKENS * 256 // 8  # scratch of the logits' chunks
HALVES = 2 * 96 * TOKENS  # scratch elements: gradients of a feed-forward layer's halves
KV = 2 * 2 * 16 * 4 * LONGEST  # elements of a request
STAGING = 64 << 20


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def plan(
    here: Path,
    world: int,
    *overrides: str,
    algorithm: str = "grpo",
    engine: str = "hf",
    host: Host | None = None,
    **cluster: float,
) -> dict[str, Any]:
    """Returns a report; on CPU with engine hf, unless the cluster is told."""
    samples = 4 if algorithm == "grpo" else 1
    content = {
        "run": {"name": "a"},
        "model": {"init": str(here / "model")},
        "algorithm": {"name": algorithm},
        "steps": {"samples_per_prompt": samples, "prompts_per_step": SAMPLES // samples},
        "rollout": {"engine": engine, "max_new_tokens": LONGEST - 16, "staging_mib": 64},
        "data": {"max_prompt_tokens": 16},
        "train": {"micro_batch_tokens": TOKENS, "share_prompts": False},
    }
    config = load_config_dict(content, list(overrides))
    given = ClusterFile.model_validate(cluster) if cluster else None
    report, violations = plan_report(config, world, given, host)
    assert violations == []
    return report


def peaks(report: dict[str, Any]) -> dict[str, tuple[list[str], int, int]]:
    """Returns the roles and both peaks of each set of ranks, by its first and last."""
    return {
        f"{one['ranks'][0]}-{one['ranks'][-1]}": (
            one["roles"],
            one["train_peak_bytes"],
            one["rollout_peak_bytes"],
        )
        for one in report["ranks"]
    }


def test_without_a_placement_all_ranks_are_one_set(here: Path) -> None:
    report = plan(here, 4, algorithm="ppo")
    (one,) = report["ranks"]
    assert one["ranks"] == [0, 1, 2, 3] and one["roles"] == ["policy", "rollout", "critic"]
    memory = report["memory"]
    assert [one["train_peak_bytes"], one["rollout_peak_bytes"]] == [
        memory["train_peak_bytes"],
        memory["rollout_peak_bytes"],
    ]
    assert "ranks 0-3:" not in plan_text(report)


def test_a_policy_and_engines_apart_hold_only_their_own(here: Path) -> None:
    """On CPU, in float32: gradients and two moments beside the weights, no masters."""
    report = plan(here, 4, "placement.policy=0-1", "placement.rollout=2-3")
    trained = 4 * WHOLE + 8 * WHOLE // 2
    passes = 4 * TOKENS * 4 * PER_TOKEN + 4 * HALVES
    cache = 4 * KV * (SAMPLES // 2)
    assert peaks(report) == {
        "0-1": (["policy"], trained + 4 * WHOLE + passes, trained),
        "2-3": (["rollout"], 4 * WHOLE, 4 * WHOLE + cache),  # this engine does not sleep
    }
    assert report["memory"]["train_peak_bytes"] == trained + 4 * WHOLE + passes
    assert report["memory"]["rollout_peak_bytes"] == max(trained, 4 * WHOLE + cache)
    verdict = report["verdict"]
    assert (verdict["phase"], verdict["kv_cache_bytes"]) == ("training", cache)
    assert verdict["max_requests"] == SAMPLES // 2
    total = 2 * (trained + 4 * WHOLE + passes) + 2 * (4 * WHOLE + cache)
    assert f"4 ranks use about {total / 2**20:.1f} MiB" in verdict["summary"]
    assert report["rollout"]["assignment"] == [None, None, [0, 0], [1, 0]]
    assert report["rollout"]["replicas"] == 2
    reshard = report["reshard"]
    assert reshard["receive_bytes"] == [0, 0, 4 * WHOLE, 4 * WHOLE]
    assert reshard["send_bytes"] == [4 * WHOLE, 4 * WHOLE, 0, 0]
    assert reshard["local_bytes"] == reshard["alias_bytes"] == [0] * 4
    for costs in (report["rollout"]["choices"][n] for n in ("used", "consecutive", "any_order")):
        assert costs["tp_ranks"] == [None, None, 0, 0]
        assert costs["max_receive_bytes"] == costs["max_send_bytes"] == 4 * WHOLE


def test_traffic_is_that_of_a_plan_with_nothing_on_the_other_ranks(here: Path) -> None:
    """Two ranks train in two stages, two generate, of which one trains."""
    report = plan(here, 3, "train.pp=2", "placement.policy=0,2", "placement.rollout=1-2")
    family, shape = llama.FAMILY, llama.FAMILY.shape(SIZES)
    first, last = megatron_layouts(family, shape, TrainLayout(2, pp=2))
    sources = [first, NOTHING, last]
    engine = hf_layout(hf_shapes(family, shape))
    found = plan_reshard(sources, [NOTHING, engine, engine], 4, 3)
    reshard = report["reshard"]
    assert reshard["receive_bytes"] == list(found.receive_bytes)
    assert reshard["send_bytes"] == list(found.send_bytes)
    assert reshard["messages"] == list(found.messages)
    stages = 2 * (MATRICES + NORMS) + EMBEDDING, 2 * (MATRICES + NORMS) + EMBEDDING + 64
    assert reshard["receive_bytes"] == [0, 4 * WHOLE, 4 * stages[0]]
    assert reshard["local_bytes"] == [0, 0, 4 * stages[1]]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_critic_of_its_own_holds_no_engine_and_is_cut_as_it_says(here: Path, tp: int) -> None:
    placed = "placement.policy=0-1", "placement.rollout=0-1"
    own = f"placement.critic={{ranks: 2-3, tp: {tp}}}"
    found = peaks(plan(here, 4, *placed, own, algorithm="ppo"))
    part, replicas = (WHOLE, 2) if tp == 1 else (HALF, 1)
    trained = 4 * part + 8 * part // replicas
    passes = (4 * TOKENS * 4 * PER_TOKEN + 4 * HALVES) // tp
    assert found["2-3"] == (["critic"], trained + 4 * part + passes, trained)
    assert found["0-1"][0] == ["policy", "rollout"]
    alone = plan(here, 2)  # the same policy on two ranks, without a critic
    assert found["0-1"][1:] == peaks(alone)["0-1"][1:]


def test_ranks_of_several_stages_are_judged_by_the_fullest(here: Path) -> None:
    report = plan(here, 3, "train.pp=2", "placement.policy=0-1", "placement.rollout=2")
    last = 2 * (MATRICES + NORMS) + EMBEDDING + 64  # the first stage has no last norm
    assert peaks(report)["0-1"][2] == 4 * last + 8 * last


def test_a_critic_alone_sends_no_weights_and_has_no_staging(here: Path) -> None:
    placed = "placement.policy=0", "placement.rollout=1", "placement.critic=2"
    options = (*placed, "rollout.transport=packed")
    found = peaks(plan(here, 3, *options, algorithm="ppo", engine="vllm"))
    groups = 2 * GROUP_BYTES  # the world's, and that of blocks
    trained = (2 + 12) * WHOLE
    assert found["0-0"] == (["policy"], found["0-0"][1], groups + STAGING + trained)
    assert found["2-2"] == (["critic"], found["0-0"][1] - STAGING, groups + trained)


def test_models_beside_each_other_on_the_same_ranks_add_up(here: Path) -> None:
    """A critic that is cut otherwise than the policy has groups of its own."""
    shared = plan(here, 4, algorithm="ppo", engine="vllm")
    report = plan(here, 4, "placement.critic.tp=2", algorithm="ppo", engine="vllm")
    (one,), (before,) = report["ranks"], shared["ranks"]
    assert one["roles"] == before["roles"] == ["policy", "rollout", "critic"]
    # 16-bit weights and fp32 gradients; masters and moments shared out over 4 and over 2 ranks.
    less = (2 + 4) * WHOLE + 12 * WHOLE // 4 - ((2 + 4) * HALF + 12 * HALF // 2)
    groups = 4 * GROUP_BYTES  # tp, dp, dp with cp, tp with pp
    assert one["train_peak_bytes"] == before["train_peak_bytes"] - less + groups
    assert report["order"]["reason"].startswith("Megatron's own; hybridrl optimizes the order")
    # With the same sizes said explicitly nothing differs.
    said = "placement.critic={ranks: 0-3, tp: 1}"
    assert plan(here, 4, said, algorithm="ppo", engine="vllm") == shared


def test_overlapping_ranks_hold_both(here: Path) -> None:
    """Two stages on 0-3, engines of two ranks on 2-5, over messages."""
    report = plan(
        here,
        6,
        "train.pp=2",
        "rollout.tp=2",
        "placement.policy=0-3",
        "placement.rollout=2-5",
        "rollout.transport=packed",
        engine="vllm",
    )
    layers = 2 * (MATRICES + NORMS) + EMBEDDING
    stages = {"0-1": layers, "2-3": layers + 64}
    passes = 2 * TOKENS * 2 * 2 * PER_TOKEN + 2 * HALVES  # two micro-batches are in the pipeline
    cache, own = 2 * KV // 2 * 256, 2 * HALF  # a fixed cache, with half of the heads
    # The world, pp, dp, dp with cp, pp with tp, and that of blocks; an engine's two.
    groups = {"0-1": 6, "2-3": 8, "4-5": 4}
    always = {ranks: n * GROUP_BYTES + STAGING for ranks, n in groups.items()}
    found = peaks(report)
    for ranks, part in stages.items():
        held = always[ranks] + (2 * part + 12 * part // 2)
        if ranks == "0-1":
            assert found[ranks] == (["policy"], held + 4 * part + passes, held)
        else:
            held += GRAPH_BYTES
            shared = 2 * (2 * NORMS + 64)  # the norms of its stage are the trainer's memory
            assert report["reshard"]["alias_bytes"] == [0, 0, shared, shared, 0, 0]
            assert found[ranks] == (
                ["policy", "rollout"],
                held + 4 * part + passes,
                held + own - shared + cache,
            )
    rest = always["4-5"] + GRAPH_BYTES
    assert found["4-5"] == (["rollout"], rest, rest + own + cache)
    assert report["verdict"]["summary"].startswith("fits: training on ranks 2-3 uses about")


def test_peers_have_a_piece_for_the_weights_on_every_rank(here: Path) -> None:
    placed = "placement.policy=0-1", "placement.rollout=2-3"
    over_peers = peaks(plan(here, 4, *placed, engine="vllm"))
    messages = peaks(plan(here, 4, *placed, "rollout.transport=packed", engine="vllm"))
    by_messages = GROUP_BYTES + STAGING
    assert over_peers["2-3"][1] == messages["2-3"][1] - by_messages + 2 * WHOLE
    assert over_peers["0-1"][1] == messages["0-1"][1] - by_messages


def test_a_frozen_model_alone_keeps_nothing_for_a_backward_pass(here: Path) -> None:
    reward = f"{{function: reward_model, options: {{path: '{here / 'model'}'}}}}"
    report = plan(
        here,
        4,
        "algorithm.kl_coef=0.1",
        f"reward.functions={{judge: {reward}}}",
        "placement.policy=0-1",
        "placement.rollout=0-1",
        "placement.reference=2",
        "placement.rewards.judge=3",
    )
    layer = 4 * TOKENS * PER_TOKEN
    without_head = WHOLE - EMBEDDING + 64  # but with a value's
    assert peaks(report) == {
        "0-1": peaks(plan(here, 2))["0-1"],
        "2-2": (["reference"], 4 * WHOLE + layer + HEAD, 4 * WHOLE),
        "3-3": (["reward judge"], 4 * without_head + layer, 4 * without_head),
    }


def test_other_assignments_are_judged_on_the_same_ranks(here: Path) -> None:
    report = plan(
        here,
        6,
        "train.tp=2",
        "train.order=dp-tp-cp-ep-pp",
        "rollout.tp=2",
        "placement.policy=0-3",
        "placement.rollout=0-3",
        "placement.critic=4-5",
        algorithm="ppo",
        engine="vllm",
    )
    choices = report["rollout"]["choices"]
    assert choices["used"]["tp_ranks"] == [0, 0, 1, 1, None, None]
    assert choices["used"]["max_receive_bytes"] == choices["any_order"]["max_receive_bytes"] == 0
    assert choices["consecutive"]["tp_ranks"] == [0, 1, 0, 1, None, None]
    cut = 2 * (4 * MATRICES + 2 * EMBEDDING) // 2
    assert choices["consecutive"]["max_receive_bytes"] == cut
    assert choices["remedy"] is None
    assert report["order"]["axes"] == "dp-tp-cp-ep-pp"


def test_the_text_has_a_line_for_each_set_of_ranks(here: Path) -> None:
    report = plan(
        here,
        5,
        "placement.policy=0,2",
        "placement.rollout=[1, 3]",
        "placement.critic=4",
        algorithm="ppo",
        engine="vllm",
        gpu_memory_gib=1,
    )
    lines = plan_text(report).splitlines()
    names = "0,2: policy", "1,3: rollout", "4: critic"
    for one, name in zip(report["ranks"], names, strict=True):
        train, rollout = (memory_size(one[f"{p}_peak_bytes"]) for p in ("usual_train", "rollout"))
        words = f"about {train} in training, {rollout} in rollout"
        assert f"         ranks {name}; {words}" in lines
    table = [line.split() for line in lines[-5:]]
    assert [row[:3] for row in table] == [
        ["0", "-", "-"],
        ["1", "0", "0"],
        ["2", "-", "-"],
        ["3", "1", "0"],
        ["4", "-", "-"],
    ]
    # No larger layout is tried, and none is spoken of.
    assert report["fits"] is False and report["verdict"]["remedies"] == []
    assert lines[0].startswith("does not fit: ") and lines[0].endswith(" too much")


def test_remedies_keep_what_is_named_of_shared_ranks_together(here: Path) -> None:
    """A critic that names its size, which is train's: with another of train they differ."""
    model = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen2.5-7b.json"
    given = f"model.init={model}"
    free = plan(here, 4, given, algorithm="ppo", engine="vllm")
    bound = plan(here, 4, given, "placement.critic.tp=1", algorithm="ppo", engine="vllm")
    assert any("train.tp=" in remedy for remedy in free["verdict"]["remedies"])
    assert not any("train.tp=" in remedy for remedy in bound["verdict"]["remedies"])


def test_nodes_and_gpus_are_those_of_the_plan(here: Path) -> None:
    split = "placement.policy=node:0", "placement.rollout=node:1"
    report = plan(here, 8, *split, engine="vllm", gpus_per_node=4)
    assert [one["ranks"] for one in report["ranks"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A30")
    of_host = Host(2, names=names)
    split = "placement.policy=gpu:h100", "placement.rollout=gpu:a30"
    report = plan(here, 2, *split, engine="vllm", host=of_host)
    assert [one["roles"] for one in report["ranks"]] == [["policy"], ["rollout"]]
    model = {"init": str(here / "model")}
    config = load_config_dict(
        {"run": {"name": "a"}, "model": model, "algorithm": {"name": "sft"}},
        [*split, "steps.samples_per_prompt=1", "rollout.engine=vllm"],
    )
    for host, world in ((of_host, 4), (Host(), 2)):
        _, violations = plan_report(config, world, None, host)
        assert {v.name for v in violations} == {"placement.policy.ranks", "placement.rollout.ranks"}
        assert "plan on a host with one GPU per rank" in violations[0].remedy


def test_the_command_plans_as_many_ranks_as_a_placement_names(here: Path) -> None:
    config = {
        "run": {"name": "a"},
        "model": {"init": str(here / "model")},
        "algorithm": {"name": "grpo"},
        "steps": {"samples_per_prompt": 8},
    }
    (here / "c.yaml").write_text(json.dumps(config))
    file = here / "c.yaml"
    said = run("plan", file, "placement.policy=0-1", "placement.rollout=[2, 3]")
    assert "ranks 2-3: rollout;" in said and "4 ranks use" in said
    said = run("plan", file, "placement.rollout=first:9", "--world", "4", expect=2)
    assert "placement.rollout.ranks: got first:9; allowed: at most 4, the number of ranks" in said


@pytest.mark.parametrize(
    ("visible", "order", "found"),
    [
        (None, None, None),  # CUDA may count the faster first
        (None, "PCI_BUS_ID", ("NVIDIA A30", "NVIDIA H100", "NVIDIA H100")),
        ("1,0", "PCI_BUS_ID", ("NVIDIA H100", "NVIDIA A30")),
        ("GPU-h2,GPU-a", None, ("NVIDIA H100", "NVIDIA A30")),
        ("GPU-", "PCI_BUS_ID", None),
        ("MIG-1", "PCI_BUS_ID", None),
        ("", None, None),
    ],
)
def test_names_of_gpus_are_in_cudas_order_or_not_known(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    order: str | None,
    found: tuple[str, ...] | None,
) -> None:
    lines = [
        ["0", "GPU-a", "NVIDIA A30", "1", "1"],
        ["1", "GPU-h1", "NVIDIA H100", "1", "1"],
        ["2", "GPU-h2", "NVIDIA H100", "1", "1"],
    ]
    monkeypatch.setattr(
        "hybridrl.parallel.host_gpus.num_local_gpus", lambda: 0 if visible == "" else 3
    )
    monkeypatch.setattr("hybridrl.parallel.host_gpus._listed", lambda: lines)
    for key, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, value)
    assert local_gpu_names() == found
    lines[0][2] = "NVIDIA H100"  # all alike: their order does not matter
    if visible is None:
        assert local_gpu_names() == ("NVIDIA H100",) * 3
