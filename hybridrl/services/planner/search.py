"""Searches for the layout with the shortest predicted step among those that fit. No torch.

Records why each layout is rejected: a rule (divisibility), memory or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hybridrl.config.layout import CHOSEN_KEYS
from hybridrl.config.placement import Machines
from hybridrl.config.rules import check
from hybridrl.config.rules_optimizer import LEVEL_KEY, LEVELS, allowed_levels
from hybridrl.config.rules_placement import num_experts
from hybridrl.config.schema import Config
from hybridrl.errors import ModelError, UserError
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.alike import layout_of
from hybridrl.services.planner.estimate import Estimate, estimate
from hybridrl.services.planner.fit import Changes, model_rules, with_margin
from hybridrl.services.planner.hardware import Assumptions
from hybridrl.services.planner.micro_batch_sizes import Lengths, shares_prompts
from hybridrl.services.planner.phase_memory import RoleModel

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGETS = (4096, 8192, 16384, 32768, 65536)
MOST_BUDGET, ROUND = 2**17, 64  # budgets are rounded up to a multiple of ROUND, for padding
RECOMPUTE = ("none", "selective", "full")
# Context parallelism: from LONG_SEQUENCE tokens on, with LEAST_PART per rank or more.
LONG_SEQUENCE, LEAST_PART = 8192, 2048
MOST_NODES_OF_ENGINE, MOST_STAGES = 4, 64
LAYOUT_KEYS = tuple(
    key for key in CHOSEN_KEYS if key.rpartition(".")[2] in ("tp", "pp", "cp", "ep")
)


@dataclass(frozen=True)
class Candidate:
    """Values for all keys that the search may choose, and estimated memory and times."""

    changes: Changes
    found: Estimate

    @property
    def step_s(self) -> float:
        return self.found.times.step

    def rank(self) -> tuple[int, float, int]:
        """Returns a sort key, best first. Levels that round moments come last, however fast."""
        level = list(LEVELS).index(self.changes[LEVEL_KEY])
        return level, round(self.step_s, 4), self.found.most_bytes


@dataclass
class Result:
    """Outcome of a search: the fastest fitting candidate of each layout, in order.

    `refusals` has an error per violated rule, by key; `num_large` layouts do not fit even with all
    savings; `nearest` exceeds memory the least.
    """

    best: list[Candidate] = field(default_factory=list)
    num_refused: int = 0
    refusals: dict[str, UserError] = field(default_factory=dict)
    num_large: int = 0
    nearest: Candidate | None = None


def pinned_keys(config: Config) -> set[str]:
    """Returns those keys that the search could choose but the configuration sets."""
    keys = ((key, *key.split(".")) for key in CHOSEN_KEYS)
    found = {key for key, section, name in keys if name in config.value(section).model_fields_set}
    return found - set(config.layout.chosen_keys if config.layout.chosen_for else ())


@dataclass(frozen=True)
class Search:
    """Searches layouts in which all models share all ranks; keeps keys that the config sets."""

    config: Config
    models: Sequence[RoleModel]
    hf_config: Mapping[str, Any]
    world_size: int
    assumed: Assumptions

    def run(self) -> Result:
        result, known = Result(), dict[tuple[Any, ...], list[UserError]]()
        for layout in self._layouts():
            errors = self._violations(layout, known)
            if errors:
                result.num_refused += 1
                for error in errors:
                    result.refusals.setdefault(error.name, error)
                continue
            try:
                self._judge(layout, result)
            except ModelError as error:  # a tensor cannot be sharded in this layout
                result.num_refused += 1
                result.refusals.setdefault(error.name, error)
        result.best.sort(key=Candidate.rank)
        return result

    def _layouts(self) -> Iterator[Changes]:
        config, world, node = self.config, self.world_size, self.assumed.cluster.gpus_per_node
        experts, engine = num_experts(self.hf_config), ENGINES[config.rollout.engine]
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        most_cp = longest // LEAST_PART if longest >= LONG_SEQUENCE else 1
        if self.models[0].shape.mixer is not None:
            most_cp = 1  # recurrent modules compute whole sequences
        layers = self.models[0].shape.num_layers
        most_engine = node * MOST_NODES_OF_ENGINE if engine.is_tensor_parallel else 1
        sizes = {
            "train.tp": [n for n in POWERS if n <= node],
            "train.pp": [n for n in range(1, min(layers, MOST_STAGES) + 1) if world % n == 0],
            "train.cp": [n for n in POWERS if n <= most_cp],
            "train.ep": [n for n in POWERS if n == 1 or (experts and experts % n == 0)],
            "rollout.tp": [n for n in POWERS if n <= most_engine],
            "rollout.ep": [1, 0] if experts and engine.is_expert_parallel else [1],
        }
        pinned = pinned_keys(config)
        values = [[config.value(key)] if key in pinned else sizes[key] for key in LAYOUT_KEYS]
        for chosen in product(*values):
            layout = dict(zip(LAYOUT_KEYS, chosen, strict=True))
            if layout["rollout.ep"] == 0:  # 0 stands for whole experts on each rank
                if layout["rollout.tp"] == 1:
                    continue
                layout["rollout.ep"] = layout["rollout.tp"]
            if all(world % layout[key] == 0 for key in ("train.ep", "rollout.tp")):
                yield layout

    def _violations(
        self, layout: Changes, known: dict[tuple[Any, ...], list[UserError]]
    ) -> list[UserError]:
        found: list[UserError] = []
        for section in ("train", "rollout"):
            part = {key: size for key, size in layout.items() if key.startswith(section)}
            at = (section, *part.values())
            if at not in known:
                plain = {key: 1 for key in layout if key not in part}
                if section == "rollout":
                    plain["train.vpp"] = 1
                roomy = {"train.micro_batch_tokens": max(self._budgets(1))}
                config = self.config.with_values({**plain, **part, **roomy})
                machines = Machines(self.world_size, self.assumed.cluster.gpus_per_node)
                broken = check(config, self.world_size, self.hf_config, machines=machines)
                known[at] = broken or [*model_rules(config, self.models[0], self.hf_config)]
            found += known[at]
        return found

    def _judge(self, layout: Changes, result: Result) -> None:
        dp = layout_of(self.config.with_values(layout), self.world_size).dp
        judged = [
            Candidate(changes, found)
            for budget in self._budgets(dp)
            for changes, found in self._savings({**layout, "train.micro_batch_tokens": budget})
        ]
        fitting = [one for one in judged if one.found.spare_bytes >= 0]
        if fitting:
            result.best.append(min(fitting, key=Candidate.rank))
            return
        result.num_large += 1
        nearest = max(judged, key=lambda one: one.found.spare_bytes)
        known = result.nearest
        if known is None or nearest.found.spare_bytes > known.found.spare_bytes:
            result.nearest = nearest

    def _savings(self, changes: Changes) -> Iterator[tuple[Changes, Estimate]]:
        """Yields the cheapest savings that fit for each optimizer level, or else the largest."""
        pinned, train = pinned_keys(self.config), self.config.train
        # A level that was chosen earlier may change.
        is_free = LEVEL_KEY not in pinned
        levels = allowed_levels(self.config.with_values({LEVEL_KEY: "auto"} if is_free else {}))
        recomputes = (train.recompute,) if "train.recompute" in pinned else RECOMPUTE
        for level in levels:
            for recompute in recomputes:
                saving = {"train.recompute": recompute, LEVEL_KEY: level}
                tried = {**changes, **saving}
                config = self.config.with_values(tried)
                found = estimate(config, self.models, self.world_size, self.assumed)
                if found.spare_bytes >= 0 or recompute == recomputes[-1]:
                    yield tried, found
                    break
                if with_margin(found.memory.train) <= self.assumed.gpu_memory_bytes:
                    break  # the rollout phase is too large, and recomputation does not affect it

    def _budgets(self, dp: int) -> list[int]:
        config, lengths = self.config, Lengths.of(self.config)
        if "train.micro_batch_tokens" in pinned_keys(config):
            return [config.train.micro_batch_tokens]
        longest = config.data.max_prompt_tokens + lengths.longest
        samples = config.steps.samples_per_prompt
        # Each sample stores its own copy of the last token of a shared prompt.
        group = config.data.max_prompt_tokens + samples * (lengths.longest + 1)
        unit = group if shares_prompts(config, self.models[0].shape) and samples > 1 else longest
        steps = config.steps
        per_replica = -(-steps.prompts_per_step * samples // steps.updates_per_step // dp)
        whole = per_replica * (longest + 1)
        wanted = {longest, *BUDGETS, *(unit * n for n in (1, 2, 4, 8, 16))}
        found = sorted(
            {
                -(-max(longest, min(n, whole)) // ROUND) * ROUND
                for n in wanted
                if longest <= n <= MOST_BUDGET
            }
        )
        return found or [longest]
