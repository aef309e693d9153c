"""`HermesAgentBaseEnv`: the base class of environments for Atropos, built on core's rollout."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_atropos.adapter import AdaptedEnvironment
from hermes_atropos.commands import run_commands_of
from hermes_atropos.config import HermesAgentEnvConfig
from hermes_atropos.contract import check_overrides
from hermes_atropos.display import trajectory_text
from hermes_atropos.group_workers import GroupWorkers
from hermes_atropos.groups import longest, make_scored_groups, make_scored_item
from hermes_atropos.items import ItemSource
from hermes_atropos.json_lines import JsonLines, group_json
from hermes_atropos.metrics import lengths
from hermes_atropos.modes import Serving, check_servable, process
from hermes_atropos.reporting import RolloutReporter, run_evaluation
from hermes_atropos.servers import (
    EXACT,
    default_config,
    default_server,
    fill_key,
    open_agent,
    open_servers,
    validate_servers,
)
from hermes_atropos.trainer import TrainerApi
from hermes_atropos.wandb_run import WandbRun, check_login
from hermes_core import (
    MASKED,
    AgentResult,
    ConfigError,
    Environment,
    EnvironmentConfig,
    ExactAgent,
    GroupRoller,
    Image,
    Isolation,
    Item,
    Runtime,
    Session,
    ToolContext,
    TrainerRun,
    UsageError,
    open_session,
)
from hermes_core.agents.balanced import BalancedAgent
from hermes_core.records.jsonable import plain
from hermes_core.runs.runner import STOPPING
from hermes_core.runs.session import Tools, check_scored, redactor
from hermes_core.runs.stall_watchdog import STALLS

log = logging.getLogger(__name__)

MOST_PUT_BACK = 3
"""How often an item is rolled out again because its group was incomplete."""


class HermesAgentBaseEnv(BaseEnv):  # type: ignore[misc]  # atroposlib has no types
    """An Atropos environment whose rollouts the core runs.

    Subclasses implement `setup`, `get_next_item`, `format_prompt`, `compute_reward` and `evaluate`. They may also have
    the hooks `setup_trajectory_workspace(item, …)` and `verify_and_score_trajectory(item, result, …)`, which take any
    of core's arguments (`trajectory_id`, `exec_tool`, `workspace_meta`, `rollout`).

    Args:
        config: the settings of the environment.
        server_configs: the model's servers, all of one type: `openai` returns no tokens and is for data, verifiers and
            evaluation; `vllm` and `sglang` return tokens and logprobs as sampled, and are for training.
        runtime: the runtime to use, which the caller closes; None makes one.

    Raises:
        ConfigError, UnknownNameError: a setting is wrong, or it names something that does not exist.
    """

    jsonl_writer: Any
    completion_lengths: list[int]
    rollouts_for_wandb: list[list[tuple[str, float]]]

    name: str | None = "hermes-agent"
    env_config_cls = HermesAgentEnvConfig
    isolation: ClassVar[Isolation] = Isolation.USER
    """The weakest isolation between slots that the tasks accept."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass with methods that are never called, as `check_overrides` does."""
        super().__init_subclass__(**kwargs)
        check_overrides(cls, HermesAgentBaseEnv)

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: Sequence[APIServerConfig] | APIServerConfig,
        slurm: bool = False,
        testing: bool = False,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        self.server_configs = validate_servers(server_configs, config)
        self.exact = self.server_configs[0].server_type in EXACT
        """Whether the servers return tokens and logprobs (phase 2)."""
        try:
            super().__init__(config, fill_key(self.server_configs), slurm, testing)
        except (OSError, ValueError) as error:  # transformers raises these if the tokenizer does not exist
            raise ConfigError(
                f"the tokenizer {config.tokenizer_name!r} can't be loaded: {str(error).splitlines()[0]}",
                hint="name a folder that `save_pretrained` wrote, or a model that the hub gives you",
            ) from error
        self.runtime = runtime
        self.api: TrainerApi | None = None
        self.reporter = RolloutReporter()
        self.metrics, self.evaluation = self.reporter.training, self.reporter.evaluation
        self.endless = False
        """Whether `get_next_item` starts again after the last item."""
        self.group_workers = GroupWorkers(self, self.metrics)
        """The workers of serve mode."""
        self.source = ItemSource(str(self.name), self.get_next_item)
        """A wrapper of `get_next_item` that keeps its error. It replaces the method while the environment runs, because
        Atropos calls the method, too."""
        self.evaluate = partial(run_evaluation, self.evaluate)  # type: ignore[method-assign]
        self._roller: GroupRoller | None = None
        self._model: BalancedAgent | ExactAgent | None = None
        self._returned_items: Counter[str] = Counter()
        """Number of times that each item was rolled out again, by the item's id."""
        if config.data_path_to_save_groups is not None:
            # Atropos has opened the file. Its writer has a buffer, which a killed run would lose.
            self.jsonl_writer.close()
            self.jsonl_writer = None
            Path(config.data_path_to_save_groups).unlink()

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        """Return the default settings and servers, with the values of the variables `ATROPOS_…`."""
        return default_config(cls.env_config_cls, wandb_name=cls.name), [default_server()]

    @classmethod
    def cli(cls) -> None:
        """Run the command line `{process,serve,evaluate} [--env.KEY=VALUE --openai.KEY=VALUE --config FILE]`. Exits."""
        run_commands_of(cls)

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    async def setup(self) -> None:
        """Load the dataset. Called once, before the first item is taken."""

    @abstractmethod
    async def get_next_item(self) -> Item | None:
        """Return the next item to roll out; None after the last."""

    @abstractmethod
    def format_prompt(self, item: Item) -> str:
        """Return the user message that tells the agent what to do."""

    @abstractmethod
    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        """Return the reward of a rollout, a finite number, from the state of its slot."""

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate. Called every `steps_per_eval` steps of the trainer, and by the command `evaluate`."""

    def image(self, item: Item) -> Image | None:
        """Return the image of the item's sandboxes: a name, or a build. None is the profile's image."""
        return None

    def make_environment(self, runtime: Runtime) -> Environment:
        """Return the environment of the core that calls the hooks of this one."""
        return AdaptedEnvironment(
            str(self.name),
            EnvironmentConfig(**self.config.environment_settings()),
            self.isolation,
            format_prompt=self.format_prompt,
            compute_reward=self.compute_reward,
            image=self.image,
            setup=getattr(self, "setup_trajectory_workspace", None),
            verify=getattr(self, "verify_and_score_trajectory", None),
        )

    # ------------------------------------------------------------------ life

    @asynccontextmanager
    async def running(
        self, *, start: bool = True, groups: int | None = None, evaluating: bool = False
    ) -> AsyncIterator[None]:
        """Open all that rollouts need, from the dataset to the sandboxes, for the length of the block.

        Args:
            start: whether to make the sandboxes and to begin the wandb run now.
            groups: number of groups at the same time; None is `max_num_workers`.
            evaluating: whether there is only an evaluation. Then the records of training are not touched.

        Raises:
            UsageError: the settings contradict each other or the backend; raised before a sandbox is made.
            ModelError: a model server refuses requests, or does not return what the settings need.
            InfraError: the backend or the wandb run could not be started.
        """
        async with AsyncExitStack() as stack:
            runtime = self.runtime
            if runtime is None:
                runtime = await stack.enter_async_context(Runtime())
            if self.config.use_wandb:
                await check_login()
                settings = plain(self.config.model_dump(mode="json"), runtime.redact)
                self.reporter.wandb_run = WandbRun(self.config.wandb_name or str(self.name), settings)
                stack.push_async_callback(self.reporter.wandb_run.aclose)
            stack.enter_context(
                self.reporter.open(self.trajectories_path, self.evaluations_path, only_evaluates=evaluating)
            )
            get_next_item = self.get_next_item
            self.source = self.get_next_item = ItemSource(str(self.name), get_next_item)  # type: ignore[method-assign]
            stack.callback(setattr, self, "get_next_item", get_next_item)
            environment = self.make_environment(runtime)
            check_scored(environment)
            options = self.config.run_options(groups or self.max_num_workers)
            backend_class = runtime.backend(options.backend).config_class
            profile = backend_class.from_dict("default", options.backend_config).model_dump(exclude_unset=True)
            options = options.model_copy(update={"backend_config": {**profile, "name": "default"}})
            model, server_settings = open_servers(
                runtime,
                self.server_configs,
                self.config,
                self.tokenizer,
                max_length=self.config.max_token_length,
                tools=bool(options.mcp or Tools(runtime, environment, self.config.seed).names()),
            )
            stack.push_async_callback(model.aclose)
            agent = open_agent(runtime, self.config, model, server_settings[0])
            redact = redactor(runtime, *server_settings)
            stalls = self.trajectories_path.with_suffix(f".{STALLS}")
            run = TrainerRun(
                partial(open_session, runtime, environment, agent, options, load=self.setup, redact=redact),
                sandboxes=partial(Session.sandboxes, start=False, stalls=stalls),
                exact=self.exact,
                refills=self.config.group_refills,
                records=self.reporter,
            )
            await stack.enter_async_context(run)
            roller = await run.roller()
            if start:
                if self.wandb_run is not None:
                    await self.wandb_run.start()
                await roller.context.backend.start()
            if self.config.data_path_to_save_groups is not None:
                self.jsonl_writer = stack.enter_context(JsonLines(Path(self.config.data_path_to_save_groups)))
            self._roller, self._model = roller, model
            try:
                yield
            finally:
                self._roller = self._model = self.jsonl_writer = None

    @property
    def roller(self) -> GroupRoller:
        """Return the object that rolls out groups.

        Raises:
            UsageError: the environment is not running.
        """
        if self._roller is None:
            raise UsageError("the environment is not running", hint="use `async with env.running():`")
        return self._roller

    @property
    def wandb_run(self) -> WandbRun | None:
        """Return the wandb run; None if wandb is off or the environment is not running."""
        return self.reporter.wandb_run

    async def env_manager(self) -> None:
        """Run serve mode: send groups to the trainer at `rollout_server_url` until it has made `total_steps` steps.

        Raises:
            ConfigError: the servers return no tokens, no group could be sent, or sizes do not fit the trainer's.
            UsageError, InfraError, ModelError: as `running` does, or as `Serving.run`.
        """
        config = self.config
        check_servable(config, exact=self.exact)
        registration = {
            "max_token_length": config.max_token_length,
            "desired_name": config.wandb_name or self.name,
            "weight": config.inference_weight,
            "min_batch_allocation": config.min_batch_allocation,
            "group_size": config.group_size,
        }
        self.endless = True
        self.api = api = TrainerApi(config.rollout_server_url, registration, patience_s=config.trainer_timeout)
        async with self.running(start=False), api:
            await Serving(self, config, api, self.roller, self.source, self.reporter, self.group_workers).run()

    def apply_trainer_settings(self, registration: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Apply the trainer's settings.

        Args:
            registration: the API's answer to the registration.
            info: the trainer's `batch_size` and `max_token_len`, each -1 if it is unknown.
        """
        config = self.config
        self.env_id, self.wandb_prepend = registration["env_id"], registration["wandb_name"]
        self.curr_step = registration["starting_step"]
        self.checkpoint_dir, self.checkpoint_interval = (
            registration["checkpoint_dir"],
            registration["checkpoint_interval"],
        )
        if config.total_steps == -1:
            config.total_steps = registration["num_steps"]
        if info["batch_size"] != -1:
            config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            self.max_token_len = info["max_token_len"]
            if isinstance(self._model, ExactAgent):  # a sequence as long as the limit would drop its whole group
                self._model.max_length = min(config.max_token_length, self.max_token_len - 1)
        if self.curr_step > 0:
            self.load_checkpoint()

    async def process_manager(self) -> None:
        """Run process mode: write `total_steps` groups to `data_path_to_save_groups`.

        Raises:
            ConfigError: `total_steps` is below 1.
            UsageError, InfraError, ModelError: as `running` does, or as `process`.
        """
        steps, path = self.config.total_steps, self.config.data_path_to_save_groups
        if steps < 1:
            raise ConfigError(f"total_steps is {steps}", hint="name the number of groups")
        at_a_time = max(1, min(self.max_num_workers, steps))
        async with self.running(groups=at_a_time):
            try:
                await process(self, steps, at_a_time, self.roller, self.source)
            finally:
                if self.metrics.pending:
                    await self.wandb_log()
        if path is not None:
            log.info("wrote %s; `hermes-rl show %s` shows the rollouts", path, self.trajectories_path)

    async def evaluate_manager(self) -> None:
        """Run evaluate mode: call `evaluate` once."""
        async with self.running(groups=self.config.max_eval_workers, evaluating=True):
            await self.evaluate()

    def outcome(self, mode: str) -> dict[str, Any]:
        """Return the counts of a mode that has ended, and the paths of its files: `written` and `trajectories`."""
        config, totals = self.config, self.metrics.totals.copy()
        written, records = config.data_path_to_save_groups, self.trajectories_path
        if mode == "evaluate":
            totals.update(self.evaluation.totals)
            written, records = config.data_dir_to_save_evals, self.evaluations_path
        return {**dict(sorted(totals.items())), "written": written, "trajectories": str(records)}

    @property
    def trajectories_path(self) -> Path:
        """Return the path of the file with the records of all rollouts, except those of evaluations."""
        config = self.config
        if config.trajectories_path is not None:
            return Path(config.trajectories_path)
        groups = Path(config.data_path_to_save_groups or f"data/{self.name}.jsonl")
        return groups.with_name(f"{groups.stem}.trajectories.jsonl")

    @property
    def evaluations_path(self) -> Path:
        """Return the path of the file with the records of evaluations."""
        path = self.trajectories_path
        return path.with_name(f"{path.stem.removesuffix('.trajectories')}.evaluations.jsonl")

    # ------------------------------------------------------------------ rollouts

    async def collect_trajectories(self, item: Item) -> tuple[list[dict[str, Any]] | None, list[Item]]:
        """Roll out a group of one item, and return the groups to send and the items to roll out again.

        If the group is incomplete, None takes the place of the groups. If sandboxes or the model failed, the item is to
        be rolled out again, up to `MOST_PUT_BACK` times.
        """
        try:
            group = await self.roller.roll(item, self.config.group_size)
        except STOPPING:
            return None, [item]
        if group.whole:
            return make_scored_groups(group), []
        self._returned_items[group.item_id] += 1
        again = group.unlucky and self._returned_items[group.item_id] <= MOST_PUT_BACK
        log.warning(
            "group %s of item %s stays short: %d of %d rollouts can be used; not sent%s",
            *(group.group_id, group.item_id, len(group.kept), group.size),
            ", and the item is put back" if again else "",
        )
        if again:
            self.metrics.count_returned_item()
        return None, [item] if again else []

    async def collect_trajectory(self, item: Item) -> tuple[dict[str, Any] | None, list[Item]]:
        """Do one rollout, and return it as a scored item; None if it can't be used. Subclasses must not override this.

        Raises:
            UsageError: the rollout has several sequences; `collect_trajectories` returns them all.
        """
        group = await self.roller.roll_one(item)
        return (make_scored_item(group) if group.whole else None), []

    # ------------------------------------------------------------------ what Atropos calls

    async def handle_env(self, item_uuid: str) -> Any:
        """Run Atropos' own method in a task that `group_workers` can end."""
        return await self.group_workers.track(super().handle_env(item_uuid))

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item | None = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Write groups to the file, and send each until the API has acknowledged it."""
        groups = [group for group in (scored_data if isinstance(scored_data, list) else [scored_data]) if group]
        if not groups or not self._worth_sending(groups, abort_on_any_max_length_exceeded):
            return
        await self.add_rollouts_for_wandb(groups[0], item)
        for group in groups:
            self.completion_lengths += [len(masks) - masks.count(MASKED) for masks in group["masks"]]
            if self.jsonl_writer is not None:
                self.jsonl_writer.write_line(await group_json(group) + b"\n")
            if do_send_to_api:
                self.items_sent_this_step += 1
                await self._send_scored_data_to_api(group)

    def _worth_sending(self, groups: Sequence[Mapping[str, Any]], check_length: bool) -> bool:
        if self.config.ensure_scores_are_not_same and len(set(groups[0]["scores"])) == 1:
            self.metrics.count_same_score()
            return False
        if check_length and 0 < self.max_token_len <= longest(groups):
            self.metrics.count_too_long()
            log.warning("a group has a sequence of %d tokens; the trainer takes less", longest(groups))
            return False
        return True

    async def _send_scored_data_to_api(self, scored_data: Mapping[str, Any]) -> None:
        if self.api is None:
            raise UsageError("there is no API to send to", hint="use serve mode")
        sent = scored_data if self.config.include_messages else {**scored_data, "messages": None}
        await self.api.send(sent)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item | None = None) -> None:
        """Keep some rollouts of a group, as text, for the table of wandb."""
        if self.wandb_run is not None:
            limit = self.config.num_rollouts_per_group_for_logging
            pairs = list(zip(scored_data["messages"], scored_data["scores"], strict=True))
            chosen = pairs if limit == -1 else pairs[:limit]
            self.rollouts_for_wandb.append([(trajectory_text(messages), score) for messages, score in chosen])
            del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the metrics since the last call: as JSON beside the trajectories, and to wandb if it is enabled.

        Args:
            wandb_metrics: further metrics.
        """
        counts = self.api.counts if self.api is not None else None
        metrics = {**self.metrics.take(counts), **lengths(self.completion_lengths, self.max_token_len)}
        metrics |= wandb_metrics or {}
        self.completion_lengths = []
        self.reporter.write_metrics(self.curr_step, metrics)
        if self.wandb_run is not None:
            metrics = self.perf_stats(await self.create_rollout_table(metrics))
            self.rollouts_for_wandb = []
            prefix = (
                "" if self.wandb_prepend is None else f"{self.wandb_prepend}_"
            )  # the name that run-api gave this environment
            await self.wandb_run.log({prefix + key: value for key, value in metrics.items()}, self.curr_step)
