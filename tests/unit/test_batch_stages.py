"""The stages of a batch: what they hold, what they refuse, and what selecting does to them."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import observed_batch, rollout_batch, rollouts, train_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_ranks

from hybridrl.contracts.batch import (
    LENGTHS,
    BatchError,
    Producer,
    Prompt,
    Rollout,
    RolloutBatch,
    ScoredBatch,
    TrainBatch,
)
from hybridrl.contracts.checks import RESPONSE, columns_of, holds
from hybridrl.contracts.micro_batch import LOSS_COLUMNS, MicroBatch
from hybridrl.contracts.ragged import repeated_versions
from hybridrl.generation.sample_tables import gathered_batch, table_of
from hybridrl.parallel.exchange import collect

HERE = Producer.here("test")
THIS_FILE = Path(__file__).name


def exact_match(prompts, responses, columns):
    return np.zeros((len(prompts), 12))


def per_sample(batch: TrainBatch) -> list[dict[str, object]]:
    """Every sample as plain lists, read with a loop of its own."""
    found, start = [], 0
    for i, length in enumerate(batch.lengths_B.tolist()):
        part = slice(start, start + length)
        row: dict[str, object] = {
            n: c[part].tolist() for n, c in batch.columns().items() if n.endswith(("T", "TK"))
        }
        row |= {n: c[i].item() for n, c in batch.columns().items() if n[-1] == "B"}
        for name, blob in batch.blobs.items():
            row[name] = blob.values_N.split(blob.num_rows_B.tolist())[i].tolist()
        row |= {"part": batch.reward_parts["part"][i].item(), "prompt": batch.prompts[i]}
        found.append(row)
        start += length
    return found


def test_from_rollouts_lays_samples_one_after_the_other():
    made = rollouts()
    batch = rollout_batch()
    tokens, logps, mask = [], [], []
    for rollout in made:
        tokens += [*rollout.prompt.tokens, *rollout.tokens]
        logps += [0.0] * len(rollout.prompt.tokens) + list(rollout.logps)
        mask += [False] * len(rollout.prompt.tokens) + [True] * len(rollout.tokens)
    assert batch.tokens_T.tolist() == tokens
    assert batch.behaviour_logp_T.tolist() == pytest.approx(logps)
    assert batch.response_mask_T.tolist() == mask
    assert batch.offsets.tolist()[-1] == batch.num_tokens == len(tokens)
    assert batch.response_lengths_B.tolist() == [len(r.tokens) for r in made]
    assert batch.finished_B.tolist() == [r.finish_reason == "stop" for r in made]
    assert batch.group_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.sample_index_T[batch.offsets[:-1]].tolist() == list(range(6))


def test_scored_names_the_producer_its_line_the_shape_and_the_field():
    batch = rollout_batch(num_prompts=2, samples_per_prompt=2)
    line = exact_match.__code__.co_firstlineno
    with pytest.raises(BatchError) as caught:
        batch.scored(torch.zeros(4, 12), {}, Producer.of(exact_match, "reward 'exact_match'"))
    start = (
        f"reward 'exact_match' ({THIS_FILE}:{line}) returned shape (4, 12), expected (4,) floats"
    )
    assert str(caught.value).startswith(start)
    assert "reward_B" in str(caught.value)


def test_batch_error_survives_pickling_between_ranks():
    error = BatchError(HERE, "reward_B", "returned nan", "a float", "Mend it.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is BatchError
    assert str(again) == str(error)
    assert (again.producer, again.name, again.value, again.allowed, again.remedy) == (
        HERE, "reward_B", "returned nan", "a float", "Mend it.",
    )  # fmt: skip


def test_producer_of_an_object_is_its_class_and_of_a_builtin_has_no_line():
    class Reward:
        def __call__(self):
            return 0.0

    found = Producer.of(Reward(), "reward")
    assert found.file == __file__
    assert "class Reward" in Path(__file__).read_text().splitlines()[found.line - 1]
    assert Producer.of(len, "reward").line == 0


BAD_COLUMNS = {
    "a list": (lambda good: good.tolist(), "a tensor of"),
    "too short": (lambda good: good[:-1], "floats"),
    "too many dimensions": (lambda good: good[:, None], "floats"),
    "float64": (lambda good: good.double(), "torch.float32"),
    "integers": (lambda good: good.long(), "torch.float32"),
    "nan": (lambda good: good.index_fill(0, torch.tensor([len(good) - 1]), torch.nan), "finite"),
    "infinite": (
        lambda good: good.index_fill(0, torch.tensor([len(good) - 1]), -torch.inf),
        "finite",
    ),
    "on a prompt token": (lambda good: good.index_fill(0, torch.tensor([0]), 1.0), "prompt tokens"),
    "with a gradient": (lambda good: good.clone().requires_grad_(), "without a gradient"),
}


@pytest.mark.parametrize("name", ["old_logp_T", "values_T", "behaviour_logp_T", "teacher_logp_TK"])
@pytest.mark.parametrize("bad", BAD_COLUMNS)
def test_join_columns_refuses_a_column_that_does_not_fit(name, bad):
    batch = train_batch()
    spoil, expected = BAD_COLUMNS[bad]
    producer = Producer.here("the policy")
    with pytest.raises(BatchError) as caught:
        batch.join_columns(producer, **{name: spoil(batch.columns()[name])})
    message = str(caught.value)
    assert message.startswith(f"the policy ({THIS_FILE}:{producer.line}) returned ")
    assert f"[{name}]" in message
    assert expected in message


@pytest.mark.parametrize("bad", ["too short", "nan", "infinite", "float64", "on a prompt token"])
def test_constructing_a_stage_directly_checks_it_too(bad):
    batch = train_batch()
    spoil, expected = BAD_COLUMNS[bad]
    with pytest.raises(BatchError, match=expected):
        replace(batch, values_T=spoil(batch.values_T))


def test_join_columns_names_the_nearest_column():
    batch = train_batch()
    with pytest.raises(BatchError, match="Did you mean advantages_T"):
        batch.join_columns(HERE, advantage_T=batch.advantages_T)
    with pytest.raises(BatchError, match="unknown column"):
        rollout_batch().join_columns(HERE, values_T=batch.values_T)


def test_join_columns_leaves_the_first_batch_unchanged():
    batch = train_batch()
    before = batch.values_T.clone()
    joined = batch.join_columns(HERE, values_T=batch.values_T * 2)
    assert torch.equal(batch.values_T, before)
    assert torch.equal(joined.values_T, before * 2)
    with pytest.raises(FrozenInstanceError):
        batch.values_T = before


BAD_BATCHES = {
    "negative token": (
        lambda b: {"tokens_T": b.tokens_T.index_fill(0, torch.tensor([1]), -7)},
        "-7",
    ),
    "lengths beyond tokens": (lambda b: {"lengths_B": b.lengths_B + 1}, "shape"),
    "no response": (lambda b: {"lengths_B": b.prompt_lengths_B}, "0 response tokens"),
    "other prompts": (lambda b: {"prompts": (*b.prompts[1:], Prompt(0, "", (1,) * 9))}, "prompts"),
    "boolean version": (lambda b: {"versions_B": b.finished_B}, "torch.int64"),
    "integer finished": (lambda b: {"finished_B": b.versions_B}, "torch.bool"),
}


@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_a_batch_refuses_columns_that_contradict_each_other(bad):
    batch = rollout_batch()
    changes, expected = BAD_BATCHES[bad]
    with pytest.raises(BatchError, match=expected):
        replace(batch, **changes(batch))


def test_from_rollouts_refuses_rollouts_that_contradict_themselves():
    made = rollouts()
    groups = [0, 0, 1, 1, 2, 2]
    short = replace(made[0], logps=made[0].logps[:-1])
    with pytest.raises(BatchError, match=f"{len(short.logps)} logps for sample 0"):
        RolloutBatch.from_rollouts([short, *made[1:]], groups, HERE)
    with pytest.raises(BatchError, match="group 0 with several prompts"):
        RolloutBatch.from_rollouts(made, [0, 0, 0, 1, 2, 2], HERE)
    with pytest.raises(BatchError, match="5 groups for 6 rollouts"):
        RolloutBatch.from_rollouts(made, groups[:-1], HERE)
    with pytest.raises(BatchError, match="no sample"):
        RolloutBatch.from_rollouts([], [], HERE)
    with pytest.raises(BatchError, match="0 response tokens for sample 0"):
        RolloutBatch.from_rollouts([replace(made[0], tokens=(), logps=())], [0], HERE)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_select_gives_those_samples_in_that_order(seed, data):
    batch = train_batch(3, 2, seed)
    indices = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    rows = per_sample(batch)
    assert per_sample(batch.select(indices)) == [rows[i] for i in indices]


@pytest.mark.parametrize("indices", [[6], [-1], [[0, 1]], []])
def test_select_refuses_what_is_not_there(indices):
    with pytest.raises(BatchError):
        train_batch().select(indices)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_concat_undoes_split(seed, cut):
    batch = train_batch(3, 2, seed)
    for parts in (batch.split([cut, 6 - cut]), batch.split(3), batch.split(1)):
        assert per_sample(TrainBatch.concat(parts)) == per_sample(batch)


@pytest.mark.parametrize("parts", [4, 0, -1, [3, 2], [6, 0], []])
def test_split_refuses_parts_that_do_not_add_up(parts):
    with pytest.raises(BatchError, match="parts"):
        train_batch().split(parts)


def test_concat_refuses_batches_that_carry_different_columns():
    batch = train_batch()
    bare = replace(batch, values_T=None)
    with pytest.raises(BatchError, match="values_T"):
        TrainBatch.concat([batch, bare])
    with pytest.raises(BatchError, match="reward_parts.part"):
        TrainBatch.concat([batch, replace(batch, reward_parts={})])
    with pytest.raises(BatchError, match="blobs.routed_experts"):
        TrainBatch.concat([batch, batch.with_blobs()])
    with pytest.raises(BatchError, match="no batch"):
        TrainBatch.concat([])


def test_scored_refuses_a_part_of_another_shape():
    batch = rollout_batch()
    with pytest.raises(BatchError, match=r"\[format\]"):
        batch.scored(torch.zeros(6), {"format": torch.zeros(5)}, HERE)


def test_to_train_keeps_the_scores_and_adds_the_columns():
    full = train_batch()
    scored = ScoredBatch(**{f: getattr(full, f) for f in ScoredBatch.__dataclass_fields__})
    batch = scored.to_train(HERE, values_T=full.values_T)
    assert torch.equal(batch.reward_B, full.reward_B)
    assert torch.equal(batch.values_T, full.values_T)
    assert batch.old_logp_T is None and batch.advantages_T is None
    with pytest.raises(BatchError, match="ppo"):
        batch.require("advantages_T", "ppo")


def test_every_tensor_of_a_stage_is_a_declared_column():
    tensors = {f.name for f in fields(TrainBatch) if str(f.type).startswith("Tensor")}
    assert tensors == columns_of(TrainBatch).keys() | set(LENGTHS)
    for name, column in columns_of(TrainBatch).items():
        suffix = "_TK" if column.is_wide else "_T" if column.per_token else "_B"
        assert name.endswith(suffix), name
    made = train_batch()  # what tests of the columns' ways take for all of them
    of_agents = {"sequence_B", "branch_of_B", "branch_tokens_B", "context_B"}
    absent = {"observed_T", "num_observed_B", *of_agents}
    assert made.columns().keys() == columns_of(TrainBatch).keys() - absent


def test_versions_of_tokens_are_there_where_a_response_has_several():
    prompt = Prompt(0, "p", (5, 6))
    one = Rollout(0, prompt, (7, 8, 9), (-1.0,) * 3, "stop", 2)
    two = replace(one, sample_id=1, versions=((2, 1), (4, 2)))
    assert RolloutBatch.from_rollouts([one], [0], HERE).versions_T is None
    batch = RolloutBatch.from_rollouts([one, two], [0, 0], HERE)
    assert batch.versions_T.tolist() == [0, 0, 2, 2, 2, 0, 0, 2, 4, 4]
    assert batch.versions_B.tolist() == [2, 2]
    whole = repeated_versions(batch.versions_B, batch.lengths_B, batch.prompt_lengths_B)
    assert whole.tolist() == [0, 0, 2, 2, 2] * 2


def test_losses_read_declared_columns():
    assert len(LOSS_COLUMNS) > 5
    for name in LOSS_COLUMNS:
        column = columns_of(TrainBatch)[name.replace("_S", "_T")]
        assert column.response_only and column.is_wide == name.endswith("_SK"), name
    structure = {f.name for f in fields(MicroBatch) if f.type == "Tensor"}
    assert not structure & set(LOSS_COLUMNS)


def test_a_field_is_all_that_a_further_column_takes():
    @dataclass(frozen=True, eq=False, kw_only=True)
    class WiderBatch(TrainBatch):
        surprise_T: torch.Tensor | None = field(default=None, metadata=holds(RESPONSE))

    full = train_batch(3, 2)
    batch = WiderBatch(**{f.name: getattr(full, f.name) for f in fields(full)})
    column_T = torch.arange(batch.num_tokens).float() * batch.response_mask_T
    batch = batch.join_columns(HERE, surprise_T=column_T)
    assert torch.equal(WiderBatch.concat(batch.split(3)).surprise_T, column_T)
    with pytest.raises(BatchError, match=r"not sampled.*\[surprise_T\]"):
        batch.join_columns(HERE, surprise_T=torch.ones(batch.num_tokens))
    with pytest.raises(BatchError, match=r"surprise_T"):
        WiderBatch.concat([batch, replace(batch, surprise_T=None)])


@pytest.mark.parametrize("is_observed", [False, True])
def test_scored_batches_arrive_as_they_were_sent(is_observed):
    full = observed_batch() if is_observed else train_batch()
    scored = ScoredBatch(**{f: getattr(full, f) for f in ScoredBatch.__dataclass_fields__})
    prompts = dict(zip(scored.group_B.tolist(), scored.prompts, strict=True))
    parts = [scored.select([4, 2]), None, scored.select([3, 0]), scored.select([1, 5])]
    if is_observed:  # a rank whose responses had no observations among them
        parts[0] = replace(parts[0], observed_T=None)
        scored = ScoredBatch.concat([without_seen(scored.select([2, 4])), *parts[2:]])
        scored = scored.select(scored.sample_ids_B.argsort())

    def tell(world):
        own = parts[world.rank]
        tables = world.gather_objects(None if own is None else table_of(own))
        found = gathered_batch(tables, own, prompts, world)
        assert found.num_observed_B is None if not is_observed else True
        whole = collect(found, world)
        if whole is not None:
            assert per_sample(whole) == per_sample(scored)
            assert (whole.observed_T is not None) == is_observed
        assert torch.equal(found.reward_B, scored.reward_B)
        assert torch.equal(found.response_lengths_B, scored.response_lengths_B)

    on_ranks(4, tell)


def test_gathered_versions_are_filled_where_a_rank_has_samples_of_one_version():
    full = train_batch()
    scored = ScoredBatch(**{f: getattr(full, f) for f in ScoredBatch.__dataclass_fields__})
    prompts = dict(zip(scored.group_B.tolist(), scored.prompts, strict=True))
    first, other = scored.select([0, 1, 2]), scored.select([3, 4, 5])
    parts = [first, replace(other, versions_T=None), None]

    def tell(world):
        own = parts[world.rank]
        tables = world.gather_objects(None if own is None else table_of(own))
        whole = collect(gathered_batch(tables, own, prompts, world), world)
        if whole is not None:
            versions_T = other.versions_B[other.sample_index_T] * other.response_mask_T
            assert whole.versions_T.tolist() == [*first.versions_T.tolist(), *versions_T.tolist()]

    on_ranks(3, tell)


def without_seen(batch):
    """The batch with nothing observed."""
    return replace(batch, observed_T=torch.zeros(batch.num_tokens, dtype=torch.bool))


def test_supervised_takes_demonstrations_as_responses():
    prompts = [Prompt(0, "a", (1, 2), {}, (3, 4, 9)), Prompt(1, "b", (5,), {}, (9,))]
    batch = TrainBatch.supervised(prompts, HERE)
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 9, 5, 9]
    assert batch.response_mask_T.tolist() == [False, False, True, True, True, False, True]
    assert batch.reward_B.tolist() == [0, 0]
    with pytest.raises(BatchError, match="prompt 7 without a response"):
        TrainBatch.supervised([Prompt(7, "a", (1,))], HERE)
