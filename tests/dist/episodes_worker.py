"""One rank of the test of environments over ranks: episodes_worker.py; a world of 2."""

from __future__ import annotations

from scripted_turns import STEP, make_sampler, prompts

from hybridrl.errors import UserError
from hybridrl.parallel.exchange import collect
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform

BY_PROCESS = {"name": "own_environments:ByProcess", "workers": 1}
REWARD = {"function": "environment"}


def one_replica_of_two_ranks(world: World) -> None:
    """Both ranks go on with what the first one's environments answered."""
    sampler = make_sampler(world, RolloutLayout.consecutive(2, 2), BY_PROCESS, REWARD)
    batch = sampler.score(sampler.generate(prompts(), step=STEP))
    assert batch.num_samples == 12
    fed = [(r.prompt, r.seed) for one in sampler.engine.fed.values() for r in one]
    mine, other = world.gather_objects(fed)
    assert sorted(mine) == sorted(other) and len(mine) > 12
    assert sampler.metrics()["environment/turns_mean"] == len(mine) / 12
    said = world.gather_objects(sampler.episodes._stages is not None)
    assert said == [True, False]
    sampler.close()


def two_replicas(world: World) -> None:
    """Each has environments of its own, and every rank knows of all responses."""
    sums = {"name": "own_environments:Sums", "isolated": False}
    sampler = make_sampler(world, RolloutLayout.consecutive(2, 1), sums, REWARD)
    batch = sampler.score(sampler.generate(prompts(), step=STEP))
    whole = make_sampler(world, RolloutLayout.consecutive(2, 2), sums, REWARD)
    same = whole.score(whole.generate(prompts(), step=STEP))
    assert batch.response_lengths_B.tolist() == same.response_lengths_B.tolist()
    found, expected = (collect(one, world) for one in (batch, same))
    if found is not None and expected is not None:
        assert found.tokens_T.tolist() == expected.tokens_T.tolist()
        assert found.observed_T.tolist() == expected.observed_T.tolist()
    assert batch.reward_B.tolist() == same.reward_B.tolist()
    assert {**sampler.metrics(), "generate/idle_share": 0} == {
        **whole.metrics(),
        "generate/idle_share": 0,
    }
    sampler.close()
    whole.close()


def a_mistake_is_known_to_all_ranks(world: World) -> None:
    """What the first rank's environment says of itself is raised on the others too."""
    given = {"name": "own_environments:Mistaken", "isolated": False}
    sampler = make_sampler(world, RolloutLayout.consecutive(2, 2), given, REWARD)
    try:
        sampler.generate(prompts(), step=STEP)
    except UserError as error:
        assert "environment.options.map: got nothing" in str(error)
    else:
        raise AssertionError("no error")


def main() -> None:
    platform = Platform.detect()
    start_process_group(platform, 60.0)
    world = World(platform, 60.0)
    one_replica_of_two_ranks(world)
    two_replicas(world)
    a_mistake_is_known_to_all_ranks(world)
    stop_process_group()


if __name__ == "__main__":
    main()
