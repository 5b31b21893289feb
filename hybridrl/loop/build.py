"""Builds the components of a run: data, models, engine, sampler and observers. Collective."""

from __future__ import annotations

from hybridrl.algorithms import make_algorithm
from hybridrl.checkpoint.model_state import connect_shares, saved_bytes
from hybridrl.checkpoint.run_lock import RunLock
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.identity import check_run_folder
from hybridrl.config.own_code import contained, make_working_folder_importable
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.generation.resampling import UniformGroupsWarning
from hybridrl.loop import garbage, rollout_setup, setup
from hybridrl.loop.checkpoints import Checkpoints
from hybridrl.loop.copying import Copies
from hybridrl.loop.engine_phases import EnginePhases
from hybridrl.loop.evaluate import DueEvaluations
from hybridrl.loop.journal import Journal
from hybridrl.loop.ledger import MemoryLedger
from hybridrl.loop.position import Position
from hybridrl.loop.run_data import Given, make_data
from hybridrl.loop.run_starts import StartTimes
from hybridrl.loop.skipped import SkippedSteps
from hybridrl.loop.step_metrics import StepMetrics
from hybridrl.loop.validation import Validation
from hybridrl.loop.versions import report_untested
from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.platform import Platform, multiply_in_one_order, start_kernels_in_order
from hybridrl.roles.roles import make_roles
from hybridrl.rollout.model_rules import held_family
from hybridrl.training.mismatch import MismatchWarning


class Run:
    """All components of a run on this rank. Creating a `Run` joins the process group. Raises
    UserError if the configuration does not fit the machines, the model or the data.
    """

    def __init__(self, config: Config, given: Given, trains: bool) -> None:
        self.times = StartTimes()
        self.times.over("imports")
        garbage.collect_earlier()
        make_working_folder_importable()
        start_kernels_in_order(config.train.tp, config.train.cp)
        self.platform = Platform.detect()
        self.platform.activate()
        if config.numerics.is_exact:
            multiply_in_one_order()
        start_process_group(self.platform, config.run.collective_timeout_s)
        self.ledger = MemoryLedger(self.platform)
        try:
            with contained(), self.ledger.explained():
                self._build(config, given, trains)
        except BaseException as error:
            # After a user's mistake, leaving the process group lets the user fix it and try again.
            # After other errors, leaving might hang, because NCCL waits for failed ranks, and gloo
            # for unresponsive ranks.
            is_lost = isinstance(error, PeerError) and error.is_lost
            if isinstance(error, UserError) or (self.platform.is_cpu and not is_lost):
                stop_process_group()
            raise

    def _build(self, config: Config, given: Given, trains: bool) -> None:
        config = setup.pinned_on_all_ranks(config)
        machines = setup.find_machines(self.platform)
        setup.check_rules(config, machines, trains)
        meshes = setup.make_meshes(config, self.platform, machines)
        self.times.over("process groups")
        self.world = world = meshes.world
        self.platform.seed(config.run.seed)
        with world.all_agree("checking the run folder"):
            check_run_folder(config, trains)
        self.journal = journal = Journal(config, world)
        self.times.report, notify = journal.note_start, journal.notify
        setup.report_order(config, meshes, notify)
        self.lock = RunLock(journal.folder)
        self.skipped = SkippedSteps(config, world, journal.folder / "replay", notify)
        self.algorithm = algorithm = make_algorithm(config.algorithm)
        self.data = data = make_data(config, world, algorithm.needs, given, notify, trains)
        self.config = config = setup.with_epochs(config, len(data.prompts))
        self.position = Position(data.prompts, data.mix)
        self.evaluations = data.evaluations(config)
        self.times.over("data")
        self.roles = roles = make_roles(
            config,
            meshes,
            algorithm,
            self.ledger.models,
            notify,
            has_reference=trains or bool(data.validation),
            has_teacher=trains,
            terms=data.mix.terms,
        )
        for text in roles.shared_weights():
            notify(text)
        self.times.over("models")
        journal.warnings = (
            MismatchWarning(roles.source.dtype, config),
            UniformGroupsWarning(),
        )
        placement, model = meshes.placement, roles.policy.model
        report_untested(config, algorithm.needs.rollouts, model.layers.kind, notify)
        rollout_setup.report_merging(model.source, config.rollout, notify)
        of_policy = model.source.family, model.source.shape
        source = model.weight_source(held_family(config.rollout.engine, *of_policy))
        layout = rollout_setup.rollout_layout(
            model, config.rollout, source.layouts, placement.rollout
        )
        source = rollout_setup.engine_source(model, config.rollout, source)
        memories, weights = rollout_setup.training_memories(roles.trained.values())
        engine = rollout_setup.start_engine(config, model, source, layout, memories, weights)
        self.engine = self.ledger.engine = engine
        rollout_setup.report_copies(model.world, source.shard, engine, notify)
        self.times.over("engine")
        self.sampler = rollout_setup.make_sampler(
            config,
            model,
            layout,
            engine,
            data.scorer,
            data.tokenizer,
            data.images,
            reward_models=roles.reward_models,
            placement=placement,
            notify=notify,
        )
        self.hybrid_engine = self.ledger.hybrid_engine = rollout_setup.make_hybrid_engine(
            config, model, source, engine, memories, weights, placement
        )
        journal.unseen_bytes = lambda: rollout_setup.unseen_bytes(roles.trained, engine)
        self.phases = EnginePhases(
            config=config,
            hybrid_engine=self.hybrid_engine,
            sampler=self.sampler,
            policy=roles.policy,
            position=self.position,
            journal=journal,
        )
        folder, section = journal.folder / "checkpoints", config.checkpoint
        store = CheckpointStore(
            folder, world, section.keep, notify, meshes.name, config.run.grace_s
        )
        for trained in roles.trained.values():
            connect_shares(trained)
        # Compute this before a phase releases memory.
        num_bytes = sum(map(saved_bytes, roles.trained.values()))
        self.checkpoints = Checkpoints(
            config=config,
            lock=self.lock,
            store=store,
            copies=Copies(config, store, num_bytes, notify, trains),
            roles=roles,
            algorithm=algorithm,
            sampler=self.sampler,
            prompts=data.prompts,
            position=self.position,
            evaluations=self.evaluations,
            phases=self.phases,
            journal=journal,
        )
        metrics = StepMetrics(
            algorithm=algorithm, roles=roles, data=data, sampler=self.sampler, journal=journal
        )
        self.validation = Validation(
            steps=config.steps,
            prompts=data.validation,
            algorithm=algorithm,
            roles=roles,
            phases=self.phases,
            journal=journal,
            evaluations=self.evaluations,
        )
        self.evaluation = DueEvaluations(
            evaluations=self.evaluations,
            sampler=self.sampler,
            phases=self.phases,
            journal=journal,
        )
        # The journal comes first, because it must open its files before copies start, and record a
        # step before the copy of that step becomes valid.
        self.observers = (
            journal,
            garbage.FrozenHeap(self.platform),
            self.checkpoints,
            metrics,
            self.times,
            self.validation,
            self.evaluation,
        )
        self.times.over("plan of the weights")

    def close(self) -> None:
        """Finishes a checkpoint in progress, closes all components and leaves the process group."""
        self.checkpoints.store.complete_at_end()
        self.journal.close()
        self.lock.release()
        self.sampler.close()
        self.evaluations.close()
        self.hybrid_engine.close()
        self.engine.close()
        for model in self.ledger.models.values():
            model.close()
        garbage.take_back()
        stop_process_group()
