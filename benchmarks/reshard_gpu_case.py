"""One case of bench_reshard_gpu.py, in the processes of its ranks.

Who waits for whom: every function is collective over the world. Rank 0 writes the result anew after
each part, so that what was measured stays if a later part ends the processes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from bench_reshard_gpu import BASELINES
from case_record import READY, TURN, CaseRecord
from engine_import import after_turn
from image_workload import image_model, image_tokenizer
from megatron.core import parallel_state
from reshard_clock import Clock, attempted, link_rates, machine
from reshard_libraries import Way, checksums, give_memory_back, mbridge_way, megatron_way, spoil
from reshard_rivals import AllGatherWay, Place

from hybridrl.config.load import load_config_dict
from hybridrl.hybrid_engine.engine import gather_alike
from hybridrl.hybrid_engine.planning.nodes import TRANSPORTS as PLANNED
from hybridrl.hybrid_engine.planning.nodes import Cluster, planned_ms, predict, transfer_ms
from hybridrl.hybrid_engine.planning.pieces import join
from hybridrl.loop.trainer import Trainer
from hybridrl.models.expert_stacks import ordered_by_stack
from hybridrl.models.megatron.build import named_parameters
from hybridrl.rollout.absent import AbsentEngine
from hybridrl.training.model import ParallelModel
from hybridrl.training.peer_weights import PeerWeights

ROOT = Path(__file__).resolve().parents[1]
Kind = Literal["peer", "packed"]
TRANSPORTS: tuple[Kind, ...] = ("peer", "packed")
BUCKET_BYTES = 512 << 20
RIVAL_ITERATIONS = 5
TRANSITIONS = 3
POLL_S = 0.2
# A barrier before and one after; nothing else has a fixed cost.
LATENCY_US = 10.0


def run_case(job: Mapping[str, Any]) -> None:
    """Measures everything that the job asks for; does not return."""
    case = Case(job if job["turn"] is None else after_turn(job))
    case.save("starting")
    case.start()
    case.wait_for_turn()
    case.measure_links()
    for name in TRANSPORTS:
        case.attempt(name, partial(case.transport, name))
    if job["has_replicas"] and job["kind"] == "plain":
        case.attempt("gather", case.gather_alone)
        for name in TRANSPORTS:
            case.attempt(f"gather+{name}", partial(case.transport, name, case.gather))
    case.result["prediction"] = attempted(case.clock.gather, case.predict)
    case.result["transition"] = attempted(case.clock.gather, case.transition)
    case.save("transitions")
    baselines: dict[str, Callable[[], dict[str, Any]]] = {
        "mbridge_vllm": lambda: case.library(case.mbridge()),
        "megatron_resharding": lambda: case.library(case.megatron()),
    }
    if case.trainer.source.shape.moe is None:
        baselines["all_gather"] = partial(case.gathering_way, 0)
        baselines["buckets"] = partial(case.gathering_way, BUCKET_BYTES)
    for name in BASELINES:
        if name in job["baselines"] and name in baselines:
            case.attempt(name, baselines[name])
    case.result["is_complete"] = True
    case.save("everything")
    case.clock.line_up()
    sys.stdout.flush()
    # The system frees memory faster than vLLM and NCCL end, and the machine's time is dear.
    os._exit(0)


@dataclass
class Case(CaseRecord):
    """A case: the Trainer, and the ways into its engine."""

    link: float | None = None

    def attempt(self, name: str, what: Callable[[], dict[str, Any]]) -> None:
        """Measures one way."""
        found = attempted(self.clock.gather, what)
        self.result.setdefault("ways", {})[name] = found
        give_memory_back()
        said = found["error"] if "error" in found else f"{found['ms']:.2f} ms"
        self.save(name, said)

    # Set-up

    def start(self) -> None:
        """Makes the Trainer and fills its engine once; it stays in the rollout phase."""
        job, objects = self.job, dict[str, Any]()
        if job["frozen"]:
            ParallelModel.make_trainable = freeze  # type: ignore[method-assign]
        model = json.loads(Path(job["model"]).read_text())
        if "vision_config" in model:
            self.job = job = {**job, "model": image_model(job["model"], job["folder"])}
            size = model["text_config"]["vocab_size"]
            objects["tokenizer"] = image_tokenizer(size, job["model"])
        self.trainer = trainer = Trainer.from_config(
            config_of(job),
            prompts=[{"prompt": "1", "answer": ""}],
            reward=lambda *_: 0.0,
            **objects,
        )
        self.world, self.engine = trainer.world, trainer.hybrid_engine
        self.clock = Clock(trainer.platform.device, self.world.gather_objects)
        self.save("trainer and engine made")
        trainer.reshard()
        self.live = trainer.engine.tensors()
        engine: Any = trainer.engine  # a VllmEngine, or what stands for one on other ranks
        shared = () if isinstance(engine, AbsentEngine) else engine.shared
        self.own = {name: tensor for name, tensor in self.live.items() if name not in shared}
        plan = self.engine.plan
        shared_bytes = sum(self.live[name].nbytes for name in shared)
        self.result |= {
            "machine": machine(self.world.size),
            "assignment": [place and list(place) for place in trainer.sampler.layout.assignment],
            "receive_bytes": list(plan.receive_bytes),
            "send_bytes": list(plan.send_bytes),
            "local_bytes": list(plan.local_bytes),
            "shared_bytes": self.world.gather_objects(shared_bytes),
            "auto_transport": type(self.engine.transport).__name__,
        }
        self.save("first reshard")

    def wait_for_turn(self) -> None:
        """Waits, where other cases were started at the same time, until they measure nothing."""
        if self.job["at_once"]:
            self.save(READY)
            while not Path(self.job["folder"], TURN).exists():
                time.sleep(POLL_S)
            self.clock.line_up()
            self.save("its turn")

    def measure_links(self) -> None:
        """Measures what all figures of the case are shares of."""
        if self.world.size == 1:
            return
        links = link_rates(self.clock, self.trainer.platform.device)
        self.link = max((found.get("gb_per_s", 0.0) for found in links.values()), default=0.0)
        self.result |= {"links": links, "link_gb_per_s": self.link}
        give_memory_back()
        self.save("links")

    # Ways

    def transport(self, name: Kind, first: Callable[[], object] | None = None) -> dict[str, Any]:
        """Checks and times one transport, after something else or alone."""
        transport = self.engine.make_transport(name)

        def run() -> None:
            if first is not None:
                first()
            transport.run()

        spoil(self.own)
        run()
        early = checksums(self.own)
        self.clock.synchronize()
        if not torch.equal(early, checksums(self.own)):
            raise RuntimeError(f"{name} ends before all that it copies has arrived")
        verify_s = self.clock.seconds(self.engine.verify)
        timing = self.clock.time(run, self.job["iterations"])
        staged = self.world.gather_objects(transport.run().staging_bytes)
        return {
            **timing.report(),
            **self.rates(timing.ms),
            "extra_bytes": max(staged),
            "verify_s": verify_s,
            "is_auto": type(transport) is type(self.engine.transport),
        }

    def gather(self) -> None:
        """What the distributed optimizer's step ends with."""
        chunks: Sequence[Any] = self.trainer.policy.model.forward_chunks  # Megatron's wrappers
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)

    def gather_alone(self) -> dict[str, Any]:
        """Times the gather of the parameters; it changes none of them."""
        return self.clock.time(self.gather, self.job["iterations"]).report()

    def gathering_way(self, bucket_bytes: int) -> dict[str, Any]:
        """Checks and times a way that gathers full tensors."""
        model, layout = self.trainer.policy.model, self.trainer.sampler.layout
        rank = self.world.rank
        place = Place(
            rank=rank,
            shape=self.trainer.source.shape,
            train=model.mesh.layout,
            sources=[model.layout_of(other) for other in range(self.world.size)],
            trained=model.weights(),
            engine=self.live,
            tp=layout.tp,
            tp_rank=layout.assignment[rank][1],
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            pp_group=parallel_state.get_pipeline_model_parallel_group(),
        )
        way = AllGatherWay(place, bucket_bytes)
        return self.rival(torch.no_grad()(way.run), self.engine.verify)

    def library(self, way: AbstractContextManager[Way]) -> dict[str, Any]:
        """Checks and times a library's way."""
        began = time.monotonic()
        with way as (run, check):
            make_s = time.monotonic() - began
            self.save("a library's model made")
            return self.rival(run, check) | {"make_s": make_s}

    def mbridge(self) -> AbstractContextManager[Way]:
        return mbridge_way(self.trainer, self.own)

    def megatron(self) -> AbstractContextManager[Way]:
        return megatron_way(self.trainer, self.trainer.sampler.layout.tp)

    def rival(self, run: Callable[[], object], check: Callable[[], None]) -> dict[str, Any]:
        """Checks and times another's way."""
        spoil(self.own)
        run()
        self.clock.synchronize()
        check()
        self.save("its first run")
        timing = self.clock.time(run, RIVAL_ITERATIONS, warmups=1)
        found = timing.report() | self.rates(timing.ms)
        ours = [w["ms"] for w in self.result["ways"].values() if w.get("is_auto")]
        return found | ({"ratio": timing.ms / ours[0]} if ours else {})

    def rates(self, ms: float) -> dict[str, float]:
        """Returns the rate at which the busiest rank gets what it must receive."""
        rate = max(self.engine.plan.receive_bytes) / ms / 1e6
        return {"gb_per_s": rate} | ({"share_of_link": rate / self.link} if self.link else {})

    # The whole

    def transition(self) -> dict[str, float]:
        """Times both changes of phases, with the mapping of memory, on the host's clock."""
        found: dict[str, list[float]] = {"to_train_ms": [], "to_rollout_ms": []}
        for _ in range(TRANSITIONS):
            found["to_train_ms"].append(1e3 * self.clock.seconds(self.engine.to_train))
            found["to_rollout_ms"].append(1e3 * self.clock.seconds(self.engine.to_rollout))
        both = [sum(pair) for pair in zip(*found.values(), strict=True)]
        medians = {name: statistics.median(values) for name, values in found.items()}
        return {"transition_ms": statistics.median(both), **medians}

    def predict(self) -> dict[str, Any]:
        """Compares what the planner says with what was measured.

        plan_ms is what `hybridrl plan` prints, by transport; prediction_ms is of the schedule that
        `hybridrl plan --cluster` describes with the link that was measured, planned_ms of the plan
        as it runs.
        """
        plan, model = self.engine.plan, self.trainer.policy.model
        busiest = max(*plan.receive_bytes, *plan.send_bytes)
        copied = [a - b for a, b in zip(plan.local_bytes, self.result["shared_bytes"], strict=True)]
        local = max(*copied, 0)
        found: dict[str, Any] = {
            "plan_ms": {kind: transfer_ms(kind, busiest, local) for kind in PLANNED}
        }
        if self.link:
            cluster = Cluster(
                nodes=1,
                gpus_per_node=self.world.size,
                link_gb_per_s=self.link,
                nic_gb_per_s=1.0,  # no NIC is used
                nics_per_node=1,
                latency_us=LATENCY_US,
            )
            found["planned_ms"] = planned_ms(plan.traffic, cluster)
            if self.job["kind"] != "fused":  # whose sources are not the training layouts
                sources = [model.layout_of(rank) for rank in range(self.world.size)]
                # As the engines are: experts may lie on their ranks by a map.
                targets = gather_alike(self.trainer.engine.layout(), self.world)
                itemsize = self.trainer.source.dtype.itemsize
                predicted = predict(join(sources, targets), itemsize, cluster)
                found["prediction_ms"] = predicted.predicted_ms
        measured = {
            name: self.result["ways"][name]["ms"]
            for name in TRANSPORTS
            if "ms" in self.result["ways"][name]
        }
        found["measured_to_predicted"] = {
            name: ms / found["plan_ms"][name] for name, ms in measured.items()
        }
        return found


def freeze(
    model: ParallelModel, _learning_rate: float, peer_weights: PeerWeights | None = None
) -> None:
    """Stands in for `ParallelModel.make_trainable`: no gradients and no optimizer."""
    for chunk in model.chunks:
        chunk.eval()
    model._peer_weights = peer_weights
    if peer_weights is not None:
        # Megatron's flat buffers, as the optimizer would have them. Without requires_grad=False:
        # a source sends frozen parameters once, and each reshard here must write everything.
        named = named_parameters(model.chunks)
        parameters = [named[name] for name in reversed(ordered_by_stack(list(named)))]
        wrapped = SimpleNamespace(
            buffers=list(map(buffer_of, parameters)),
            expert_parallel_buffers=[],
            named_buffers=lambda: (
                pair for chunk in model.chunks for pair in chunk.named_buffers()
            ),
            named_parameters=lambda: (),
        )
        peer_weights.move([wrapped])


def buffer_of(parameter: torch.nn.Parameter) -> SimpleNamespace:
    """Returns a buffer in Megatron's form that holds this parameter alone."""
    whole = (0, parameter.numel(), 0)
    return SimpleNamespace(
        param_data=parameter.data.view(-1), buckets=[], param_index_map={parameter: whole}
    )


def config_of(job: Mapping[str, Any]) -> Any:
    """Returns the configuration of the case; batches are small, so that the KV cache is."""
    # A folder has an image processor, and comes with a tokenizer of its own.
    quickstart = str(ROOT / "examples" / "quickstart" / "model")
    tokenizer = {} if Path(job["model"]).is_dir() else {"tokenizer": quickstart}
    config = {
        "run": {"name": "bench", "dir": job["folder"], "collective_timeout_s": 120},
        "model": {"init": job["model"], **tokenizer},
        "train": {**job["train"], "micro_batch_tokens": 4096},
        "rollout": {
            "engine": "vllm",
            **job["rollout"],
            "max_new_tokens": 64,
            "max_batch": 8,
            "eager": True,
        },
        **({"placement": job["placement"]} if job["placement"] else {}),
        "algorithm": {"name": "grpo"},
        "data": {"max_prompt_tokens": 64},
        "steps": {"prompts_per_step": 1, "samples_per_prompt": 8},
        "log": {"console": False, "tensorboard": False, "rollouts_every": 0},
    }
    if job["kind"] == "fused":
        config["train"]["fuse_param_gather"] = True
    return load_config_dict(config, job["set"])
