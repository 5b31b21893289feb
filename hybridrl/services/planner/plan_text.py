"""Formats the report of `hybridrl plan` as text for people. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridrl.config.placement import shown
from hybridrl.config.rules_placement import AUTO_ORDER
from hybridrl.hybrid_engine.planning.assign import OrderChoice
from hybridrl.parallel.layout import DEFAULT_ORDER
from hybridrl.services.planner.image_costs import RESPONSE_IMAGES
from hybridrl.services.planner.optimizer_report import optimizer_lines
from hybridrl.services.planner.text import memory_size, traffic

MAX_ROWS = 16  # maximum number of ranks in the table; --json lists all ranks


def order_reason(
    configured: str,
    used: str,
    choice: OrderChoice | None,
    itemsize: int,
    is_shared: bool = True,
    has_experts: bool = False,
) -> str:
    """Explains the order of the training axes. `choice` is None if all orders send the same."""
    own = "Megatron's own" if used == DEFAULT_ORDER else "as configured"
    if not is_shared:
        return f"{own}; hybridrl optimizes the order only if all models and engines share all ranks"
    if has_experts:
        return f"{own}; hybridrl optimizes the order only for models without experts"
    if choice is None:
        return f"{own}; with rollout.tp=1 ranks receive the same number of bytes in any order"
    best, default = (traffic(itemsize * n) for n in (choice.receive, choice.default_receive))
    if configured != AUTO_ORDER:
        if used == choice.order:
            return f"{own}; train.order=auto would choose the same order"
        return f"{own}; auto would choose {choice.order}, with which a rank receives at most {best}"
    if used == DEFAULT_ORDER:
        return f"{own}; a rank receives at most {best}, the minimum if groups stay within nodes"
    return f"a rank receives at most {best}; in Megatron's own order it would be {default}"


def plan_text(report: dict[str, Any], is_full: bool = True) -> str:
    """Returns the report as text, verdict first; in full with assumptions and a table of ranks."""
    return "\n".join(_lines(report, is_full))


def _lines(report: dict[str, Any], is_full: bool) -> Iterator[str]:
    train, rollout, verdict = report["train"], report["rollout"], report["verdict"]
    yield verdict["summary"]
    for remedy in verdict["remedies"][1:]:
        yield f"         or with {remedy}"
    yield "train    " + " ".join(f"{axis}{size}" for axis, size in train.items())
    if report["positions"]:
        yield f"position {report['positions']}"
    if report["trained"]:
        yield f"trained  {report['trained']}"
    yield from _lora_lines(report["lora"])
    yield f"order    {report['order']['axes']}: {report['order']['reason']}"
    replicas = rollout["replicas"]
    yield (
        f"rollout  {rollout['engine']}: {replicas} {'replicas' if replicas > 1 else 'replica'} "
        f"at tp {rollout['tp']}" + (f" ep {rollout['ep']}" if "ep" in rollout else "")
    )
    if rollout.get("experts"):
        used, in_order = (
            traffic(rollout["choices"][name]["max_receive_bytes"])
            for name in ("used", "experts_in_order")
        )
        yield (
            "         ranks generate with experts that they train where possible: a rank receives "
            f"at most {used}; if experts were assigned in order, it would be {in_order}"
        )
    if positions := report["update_positions"]:
        computed, unshared = positions["computed"], positions["unshared"]
        yield (
            f"prompts  samples of a prompt share its tokens: an update computes {computed:,} "
            f"positions instead of {unshared:,} ({unshared / computed:.1f}x fewer)"
        )
    if images := report["images"]:
        size, number = memory_size(images["tower_bytes"]), images["tokens_per_response"]
        of_response = f"a response has {number:,} ({RESPONSE_IMAGES}); " if number else ""
        yield (
            f"images   a prompt has {images['tokens_per_prompt']:,} tokens of images "
            f"({images['source']}); {of_response}each rank of the first stage has a vision tower, "
            f"{size}"
        )
        if images["not_counted"]:
            yield f"         {images['not_counted']}"
    optimizer = report["optimizer"]
    if is_full or optimizer["level"] != "device" or optimizer["optimizer"] != "adamw":
        yield from optimizer_lines(report["optimizer"])
    yield from _memory_lines(report)
    yield from _rank_lines(report["ranks"])
    if step := report["step"]:
        phases = ", ".join(f"{name} {s:.1f}" for name, s in step["phases_s"].items())
        whole = f"{step['predicted_s']:.1f} s, predicted for the longest responses"
        yield f"step     {whole}: {phases}"
        if step["note"]:
            yield f"         {step['note']}"
    yield from _reshard_lines(report)
    if not is_full:
        yield "ranks    --all lists each rank and the assumptions about the cluster"
        return
    if report["assumptions"]:
        yield "assumed  (set these keys in --cluster FILE to assume other values)"
        for key in _used_assumptions(report):
            found = report["assumptions"][key]
            yield f"         {key} {found['value']:g}: {found['source']}"
    yield from _table(report)


def _lora_lines(lora: Mapping[str, Any] | None) -> Iterator[str]:
    if lora is None:
        return
    adapters, once = traffic(lora["adapter_bytes"]), _range(lora["once_receive_bytes"])
    sent = "the adapters" if lora["engine_holds_adapters"] else "merged weights"
    if lora["engine_holds_adapters"] and lora["merging"]:
        sent = "adapters and merged weights"
    of_sync = f"each sync sends {sent}, {traffic(lora['sync_bytes'])} per engine"
    yield f"lora     rank {lora['rank']}, {adapters} of adapters; {of_sync}"
    for notice in filter(None, (lora["base"], lora["merging"])):
        yield f"         {notice}"
    yield f"         other weights are sent once; a rank receives {once} of them"
    for role, found in lora["roles"].items():
        size = traffic(found["own_bytes"])
        if not found["shares_frozen_weights"]:
            yield f"         the {role} is a second model, {size}"
        elif found["own_bytes"] == 0:
            yield f"         the {role} is the policy without adapters and needs no memory"
        else:
            yield f"         the {role} uses the policy's frozen weights; its other weights: {size}"


def _used_assumptions(report: dict[str, Any]) -> Iterator[str]:
    has_network = report["assumptions"]["nodes"]["value"] > 1
    for key in report["assumptions"]:
        if has_network or key not in ("nic_gb_per_s", "nics_per_node", "latency_us"):
            yield key


def _memory_lines(report: dict[str, Any]) -> Iterator[str]:
    memory, verdict = report["memory"], report["verdict"]
    yield (
        f"memory   a rank uses {_train_peaks(memory)} in training, "
        f"{memory_size(memory['rollout_peak_bytes'])} in rollout, including "
        f"{memory_size(verdict['kv_cache_bytes'])} for a KV cache of {verdict['max_requests']} "
        "longest requests"
    )
    if copied := memory["checkpoint_copy_bytes"]:
        yield (
            f"         checkpoints are written from copies: {memory_size(copied)} of host memory "
            "per rank at most (checkpoint.asynchronous)"
        )
    if copied := memory["state_copy_bytes"]:
        yield (
            f"         the state is copied, for restarts after a failure: {memory_size(copied)} of "
            "host memory per rank at most (checkpoint.copy_every)"
        )
    if (replay := memory["router_replay"]) is not None:
        yield (
            f"         replayed experts: {replay['token_bytes']} B per token, at most "
            f"{memory_size(replay['step_bytes'])} per step on the hosts; a rank's device holds "
            f"{memory_size(replay['train_bytes'])} in training, "
            f"{memory_size(replay['rollout_bytes'])} in rollout"
        )
    if (likely := memory["likely_tokens"]) is not None:
        yield (
            f"         likely tokens: at most {likely['token_bytes']} B per sampled token, "
            f"{memory_size(likely['step_bytes'])} per step on the hosts and "
            f"{memory_size(likely['train_bytes'])} on a rank's device in training"
        )


def _rank_lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(found) == 1:
        return
    for one in found:
        yield (
            f"         ranks {shown(one['ranks'])}: {', '.join(one['roles'])}; "
            f"{_train_peaks(one)} in training, {memory_size(one['rollout_peak_bytes'])} in rollout"
        )


def _train_peaks(memory: Mapping[str, Any]) -> str:
    keys = "usual_train_peak_bytes", "train_peak_bytes"
    usual, most = (memory_size(memory[key]) for key in keys)
    return f"about {usual}" if usual == most else f"about {usual} (at most {most})"


def _reshard_lines(report: dict[str, Any]) -> Iterator[str]:
    reshard, cluster = report["reshard"], report["cluster"]
    where = "over gloo and loopback"
    if cluster is not None:
        nodes = int(report["assumptions"]["nodes"]["value"])
        where = f"over {nodes} nodes" if nodes > 1 else "on one node"
    yield f"reshard  about {_ms(reshard['predicted_ms'])} {where}"
    if cluster is not None and nodes > 1:
        yield f"         no schedule can take less than {_ms(cluster['bound_ms'])}"
    parts = (
        ("receives", "receive_bytes"),
        ("sends", "send_bytes"),
        ("copies locally", "local_bytes"),
        ("shares with its engine", "alias_bytes"),
    )
    yield "         a rank " + ", ".join(f"{what} {_range(reshard[key])}" for what, key in parts)


def _ms(duration: float) -> str:
    return f"{duration:.0f} ms" if duration >= 100 else f"{duration:.2g} ms"


def _range(sizes: Sequence[int]) -> str:
    least, most = traffic(min(sizes)), traffic(max(sizes))
    return most if least == most else f"{least} to {most}"


def _table(report: dict[str, Any]) -> Iterator[str]:
    reshard, assignment = report["reshard"], report["rollout"]["assignment"]
    if len(assignment) > MAX_ROWS:
        yield f"ranks    {len(assignment)}; --json lists them"
        return
    yield "rank  replica  tp_rank  receives_MB  sends_MB  copies_MB  shares_MB  messages"
    for rank, place in enumerate(assignment):
        replica, tp_rank = place or "--"
        keys = ("receive_bytes", "send_bytes", "local_bytes", "alias_bytes")
        received, sent, copied, shared = (reshard[key][rank] / 1e6 for key in keys)
        yield (
            f"{rank:4}  {replica:>7}  {tp_rank:>7}  {received:11.1f}  {sent:8.1f}  {copied:9.1f}  "
            f"{shared:9.1f}  {reshard['messages'][rank]:8}"
        )
