"""One case of bench_overlap.py, in the processes of its ranks.

Who waits for whom: every function is collective over the world, but for what `Decoding` does, which
talks within its replica's own groups. Of the two threads the main one trains, and asks the other
ranks over gloo which groups are whole everywhere; so all train on the same pieces in the same
order, and no collective of training follows one of decoding.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from bench_overlap import Way
from decoding_thread import Decoding, captured_at_high_priority
from reshard_clock import NotInstalledError, attempted
from sm_partition import stream_without
from step_case import LEARNING_RATE, Case, used_bytes

from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.models.megatron.heads import TokenStats
from hybridrl.parallel.schedule import finalize_summed_gradients, forward_backward
from hybridrl.training.model import _forward
from hybridrl.training.update import detached

POLL_S = 0.005  # how often training asks for whole groups while it has none
# Of the norm of the gradients: what another order of sums, and denominators of another size, make
# of them in each format.
MAX_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
MOST_COMPARED = 1 << 26  # elements of a rank's gradients, evenly spaced
ADAM_EPSILON = 1e-8


def run_case(job: Mapping[str, Any]) -> None:
    """Measures everything that the job asks for; does not return."""
    sys.setswitchinterval(job["switch_ms"] / 1e3)
    case = OverlapCase(job)
    case.save("starting")
    case.start()
    case.record()
    case.take_ways()
    case.result["is_complete"] = True
    case.save("everything")
    case.clock.line_up()
    sys.stdout.flush()
    os._exit(0)  # the system frees memory faster than vLLM and NCCL end


class OverlapCase(Case):
    """A case: a Trainer and its engine, and the passes that are timed."""

    def start(self) -> None:
        """Makes both; CUDA graphs of decoding are captured on a stream of high priority."""
        with captured_at_high_priority() as captured:
            super().start()
        self.is_gpu = not self.trainer.platform.is_cpu
        if self.is_gpu and not captured:
            raise RuntimeError("vLLM has captured its graphs on another stream: of which priority?")
        self.decode_stream = captured[0] if captured else None
        self.policy, self.model = self.trainer.policy, self.trainer.policy.model
        self._streams: dict[int, Any] = {}
        self._warm: int | None = None  # whose stream has the memory of passes
        self.result |= {"ways": {}, "switch_ms": self.job["switch_ms"]}
        for memory in self.trainer.hybrid_engine._training:
            memory.restore()  # beside the engine's, which stays

    def decoding(self) -> AbstractContextManager[Any]:
        """Returns a context in which work goes to the stream of decoding."""
        return (
            nullcontext() if self.decode_stream is None else torch.cuda.stream(self.decode_stream)
        )

    def training(self, free_sms: int) -> AbstractContextManager[Any]:
        """Returns a context in which work goes to a stream that leaves multiprocessors free."""
        if not self.is_gpu:
            if free_sms:
                raise NotInstalledError("a GPU, whose multiprocessors could be left free")
            return nullcontext()
        if free_sms not in self._streams:
            device = self.trainer.platform.device
            made = stream_without(free_sms, device) if free_sms else (torch.cuda.Stream(device), 0)
            self._streams[free_sms] = made[0]
            self.result.setdefault("training_sms", {})[free_sms] = made[1]
        if self._warm != free_sms:
            self._warm_up(free_sms)
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._streams[free_sms])
        return stream

    def _warm_up(self, free_sms: int) -> None:
        """Lets the allocator find the memory of a stream's passes, those of one piece; what it
        holds for other streams is no use to this one.
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._streams[free_sms]):
            self._clear()
            self._train(self._piece(list(self.rows))[0])
        torch.cuda.synchronize()
        self._warm = free_sms

    # The samples

    def record(self) -> None:
        """Generates once what all passes train on, and notes what each rank decodes."""
        trainer, job = self.trainer, self.job
        sampler, prompts = trainer.sampler, trainer.prompts.take(job["prompts"])
        sampler.submit(prompts, job["samples"], step=0)
        self.requests = trainer.engine.pending()
        with self.decoding():
            while sampler.has_unfinished:
                sampler.advance()
        self.synchronize()
        self.scored = sampler.score(sampler.collect())
        sampler.end_step()
        self.rows: dict[int, list[int]] = {}
        for row, group in enumerate(self.scored.group_B.tolist()):
            self.rows.setdefault(group, []).append(row)
        self.first_tokens: dict[int, tuple[int, ...]] = {}
        self.save("samples")

    def positions_of(self, group: int) -> int:
        """Returns the positions that a group takes in a micro-batch."""
        lengths, rows = self.scored.lengths_B, self.rows[group]
        prompt = int(self.scored.prompt_lengths_B[rows[0]])
        shared = (len(rows) - 1) * prompt if self.model.planner.shares_prompts else 0
        return int(lengths[rows].sum()) - shared

    # Passes

    def take_ways(self) -> None:
        """Takes the serial pass and every way, as many times as the case's time allows."""
        self.slowest_s = 0.0
        for way in (None, *map(Way.of, self.job["ways"])):
            name = "serial" if way is None else way.name
            found = attempted(self.clock.gather, partial(self._take_passes, way))
            if found:
                self.result["ways"][name] = found
                said = found.get("error") or (
                    f"{found['step_s']:.3f} s, gain {100 * found['gain']:.1f}%"
                )
                self.save(name, said)

    def _take_passes(self, way: Way | None) -> dict[str, Any]:
        """Takes the passes of a way; returns what they took, nothing where there was no time."""
        passes: list[dict[str, Any]] = []
        num_cold = int(way is None)  # the first serial pass
        for number in range(self.job["passes"] + num_cold):
            age_s = max(self.trainer.world.gather_objects(self.age_s))
            if age_s + 1.3 * self.slowest_s + 5 > self.job["limit_s"]:
                name = "serial" if way is None else way.name
                self.result.setdefault("left_out", []).append(f"{name}, pass {number + 1}")
                break
            began = time.perf_counter()
            passes.append(self.take(way))
            if number >= num_cold:
                self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
        kept = passes[num_cold:]
        return self._summary(kept) if kept else {}

    def take(self, way: Way | None) -> dict[str, Any]:
        """Takes one pass; returns what it took and how far its gradients are from the serial ones.

        Raises:
            RuntimeError: too far.
        """
        engine, job = self.trainer.engine, self.job
        engine.clear()
        if self.trainer.config.rollout.engine == "vllm" and not (
            engine._live.llm.reset_prefix_cache()
        ):
            raise RuntimeError("vLLM kept the prompts of the pass before")
        self.pieces: list[tuple[float, int]] = []
        self.waited_s = self.waited_beside_s = 0.0
        with self.training(0 if way is None else way.free_sms):
            pass  # made before the clock runs
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.clock.line_up()
        began = time.perf_counter()
        decoding = Decoding(engine, self.requests, job["samples"])
        if way is None:
            decoding.run(self.decoding())
            train_began = time.perf_counter()
            with self.training(0):
                norm = self._train_serially()
        else:
            thread = threading.Thread(target=self._decode, args=[decoding], daemon=True)
            thread.start()
            with self.training(way.free_sms):
                norm = self._train_beside(decoding, way)
            thread.join()
            train_began = self.pieces[0][0]
        self.synchronize()
        ended = time.perf_counter()
        times = ended - began, decoding.ended - began, train_began - began
        return self._told(way, decoding, times, norm)

    def _decode(self, decoding: Decoding) -> None:
        if self.is_gpu:
            torch.cuda.set_device(self.trainer.platform.device)  # a thread has its own
        decoding.run(self.decoding())

    def _train_serially(self) -> float:
        """Trains as a step does; returns the norm of the gradients."""
        algorithm, roles = self.trainer.algorithm, self.trainer.roles
        batch = algorithm.advantages(roles.add_columns(algorithm, self.scored))
        return float(self.policy.gradients(batch).grad_norm)

    def _train_beside(self, decoding: Decoding, way: Way) -> float:
        """Trains on groups as they become whole; returns the norm of the gradients."""
        world, num_ranks = self.trainer.world, self.trainer.sampler.layout.tp
        self._clear()
        waiting, seen, denominator = list[int](), set[int](), 0.0
        while len(seen) < len(self.rows) or waiting:
            own = decoding.state()
            lefts, wholes, errors = zip(*world.gather_objects(own), strict=True)
            if any(errors):
                raise RuntimeError(f"decoding failed: {max(errors)}")
            new = {group for whole in wholes for group in whole} - seen
            seen, num_left = seen | new, sum(lefts) / num_ranks
            waiting += sorted(new)
            may_begin = num_left <= way.at_most * self.scored.num_samples
            piece, is_full = self._piece(waiting) if num_left else (waiting, bool(waiting))
            if not (is_full and may_begin):
                time.sleep(POLL_S)
                self.waited_s += POLL_S
                self.waited_beside_s += POLL_S if self.pieces and decoding.num_left else 0.0
                continue
            self.pieces.append((time.perf_counter(), sum(map(self.positions_of, piece))))
            denominator += self._train(piece)
            waiting = [group for group in waiting if group not in piece]
        return self._finish(denominator)

    def _piece(self, waiting: Sequence[int]) -> tuple[list[int], bool]:
        """Returns the next groups to train on, and whether they fill a piece."""
        taken, size = list[int](), 0
        for group in waiting:
            if taken and size + self.positions_of(group) > self.job["piece_tokens"]:
                return taken, True
            taken.append(group)
            size += self.positions_of(group)
        return taken, size >= self.job["piece_tokens"]

    def _clear(self) -> None:
        for chunk in self.model.forward_chunks:
            chunk.zero_grad_buffer()
        self.model.optimizer.zero_grad()

    def _train(self, groups: Sequence[int]) -> float:
        """Looks groups up and adds their gradients, not divided by anything; returns what to divide
        them by.
        """
        algorithm, roles, model = self.trainer.algorithm, self.trainer.roles, self.model
        rows = [row for group in groups for row in self.rows[group]]
        batch = algorithm.advantages(roles.add_columns(algorithm, self.scored.select(rows)))

        def loss(output: TokenStats, micro: MicroBatch) -> tuple[torch.Tensor, Any]:
            found = algorithm.loss(output.logp_S, output.entropy_S, micro, 1.0)
            return found.loss, detached(found)

        inputs = model.plan(batch, self.policy.temperature).inputs
        with not_finalized(model.config), self.model.mesh.active():
            # As `ParallelModel.accumulate`, which clears gradients first.
            forward_backward(
                model.forward_chunks,
                inputs,
                [one.local.num_positions for one in inputs],
                _forward,
                lambda output, one: loss(output, one.local),
            )
        return float(algorithm.denominator(batch))

    def _finish(self, denominator: float) -> float:
        """Divides the gradients, and makes them whole over ranks; returns their norm."""
        model = self.model
        for gradient in self._gradients():
            gradient.div_(denominator)
        with model.mesh.active():
            finalize_summed_gradients(model.forward_chunks)
        return float(model.grad_norm())

    def synchronize(self) -> None:
        self.clock.synchronize()

    # What came of it

    def _gradients(self) -> Iterator[torch.Tensor]:
        memory = self.model.memory
        assert memory is not None
        for buffer in memory._gradient_buffers():
            yield buffer.grad_data

    def _told(
        self, way: Way | None, decoding: Decoding, times: tuple[float, float, float], norm: float
    ) -> dict[str, Any]:
        """Returns what one pass says, of the slowest rank."""
        world = self.trainer.world
        self.first_tokens = self.first_tokens or decoding.tokens
        differ = sum(self.first_tokens[i] != tokens for i, tokens in decoding.tokens.items())
        beside = [tokens for began, tokens in self.pieces if began < decoding.ended]
        own = (
            *times,
            self.waited_s,
            self.waited_beside_s,
            float(used_bytes()),
            float(torch.cuda.max_memory_allocated() if self.is_gpu else 0),
            self._slowed(decoding),
        )
        found = [max(column) for column in zip(*world.gather_objects(own), strict=True)]
        step_s, decoded_s, began_s, waited_s, waited_beside_s, *held, slowed = found
        beside_s = max(0.0, decoded_s - began_s - waited_beside_s)
        responses, all_tokens = self.scored.response_lengths_B, self.scored.lengths_B
        trained_s = step_s - began_s - (waited_beside_s if way else 0.0)
        return {
            "step_s": step_s,
            "decoded_s": decoded_s,
            "train_began_s": began_s,
            "beside_s": beside_s,
            "waited_s": waited_s,
            "trained_beside": sum(beside) / sum(map(self.positions_of, self.rows)),
            "pieces": len(self.pieces),
            "decoded_tokens_per_s": int(responses.sum()) / decoded_s,
            "trained_tokens_per_s": int(all_tokens.sum()) / trained_s,
            "decoding_slowed": slowed,
            "device_bytes": int(held[0]),
            "peak_bytes": int(held[1]),
            "samples_that_differ": sum(world.gather_objects(differ)),
            "grad_norm": norm,
            "gradients": self._compare(way),
        }

    def _slowed(self, decoding: Decoding) -> float:
        """Returns how many times as long this rank's steps of decoding took beside training as
        without, from when training began on; 1 where there are none.
        """
        if not self.pieces:
            self._alone_steps = decoding.steps
        first = self.pieces[0][0] if self.pieces else math.inf
        steps = decoding.steps[: len(self._alone_steps)]
        begun = next((i for i, ended in enumerate(steps) if ended > first), len(steps))
        if begun + 1 >= len(steps):
            return 1.0
        alone = self._alone_steps[len(steps) - 1] - self._alone_steps[begun]
        return (steps[-1] - steps[begun]) / alone

    def _compare(self, way: Way | None) -> dict[str, float]:
        """Compares the gradients with those of the first serial pass.

        Returns:
            `difference`, the norm of the differences over the gradients' own; `largest`, of the
            largest gradient; and `weights`, the largest difference between weights after a first
            step of Adam, of the rank where it is largest.
        """
        gradients = [gradient.view(-1) for gradient in self._gradients()]
        every = math.ceil(sum(g.numel() for g in gradients) / MOST_COMPARED)
        sample = torch.cat([gradient[::every] for gradient in gradients])
        if not hasattr(self, "_first"):
            self._first = sample
        away = (sample - self._first).abs()
        sums = torch.stack([away.square().sum(), self._first.square().sum()]).double().cpu()
        changed, whole = self.trainer.world.sum_over_world(sums).sqrt().tolist()
        found = {
            "difference": changed / whole,
            "largest": float(away.max() / self._first.abs().max()),
        }
        steps = [g / (g.abs() + ADAM_EPSILON) for g in (sample, self._first)]
        found["weights"] = LEARNING_RATE * float((steps[0] - steps[1]).abs().max())
        ranks = self.trainer.world.gather_objects(found)
        found = {name: max(rank[name] for rank in ranks) for name in found}
        most = MAX_DIFFERENCE[self.trainer.source.dtype]
        if not found["difference"] <= most:
            name = "serial" if way is None else way.name
            raise RuntimeError(f"{name}: gradients differ by {found['difference']:.2g} > {most:g}")
        return found

    def _summary(self, passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns medians over passes, and what they gain on the serial ones."""
        found: dict[str, Any] = {
            name: statistics.median(one[name] for one in passes)
            for name, value in passes[0].items()
            if not isinstance(value, dict)
        }
        for name in ("device_bytes", "peak_bytes", "samples_that_differ"):
            found[name] = max(one[name] for one in passes)
        found["gradients"] = {
            name: max(one["gradients"][name] for one in passes) for name in passes[0]["gradients"]
        }
        serial_s = self.result["ways"].get("serial", found)["step_s"]
        found["gain"] = 1 - found["step_s"] / serial_s
        beside_s, gained_s = found["beside_s"], serial_s - found["step_s"]
        # Of the speeds that decoding and training keep while they share the GPU.
        found["sum_of_shares"] = 1 + gained_s / beside_s if beside_s else 1.0
        return {**found, "of_passes": len(passes), "steps_s": [one["step_s"] for one in passes]}


@contextmanager
def not_finalized(config: Any) -> Iterator[None]:
    """Lets Megatron's schedule leave gradients as they are, for more to be added."""
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize
