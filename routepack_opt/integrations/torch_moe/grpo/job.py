"""What a training run is made of, built the same on every rank: mesh, model, optimizer, task; and its checkpoints."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.integrations.torch_moe.checkpoint.save_load import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from routepack_opt.integrations.torch_moe.grpo.loss import supervised_loss, supervised_sample
from routepack_opt.integrations.torch_moe.grpo.task import ArithmeticTask
from routepack_opt.integrations.torch_moe.grpo.tokenizer import VOCAB_SIZE
from routepack_opt.integrations.torch_moe.model.config import MoEConfig
from routepack_opt.integrations.torch_moe.model.decoder import build_model
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
from routepack_opt.integrations.torch_moe.step.train_step import train_step
from routepack_opt.topology import Topology

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.grpo.run_config import RunConfig

logger = logging.getLogger(__name__)

# keys a resumed run may change: they alter neither the problems, the weights nor what a step computes
_FREE_KEYS = {
    "run": {"steps", "out", "checkpoint_every", "keep", "tensorboard", "timeline_steps"},
    "parallel": {"backend", "threads", "timeout_s", "processes", "ep", "shards"},
    "plan": {"overlap", "planner", "budget_s", "budget_steps", "max_moved", "late_moves", "chunk_mib"}
    | {"seconds_per_unit", "seconds_per_expert"},
}


@dataclass(frozen=True, eq=False)
class Job:
    """One rank's part of a run."""

    config: RunConfig
    mesh: ParallelMesh
    slot_map: SlotMap
    model: Any
    optimizer: MoEAdamW
    task: ArithmeticTask

    @classmethod
    def build(cls, config: RunConfig, device: torch.device | str) -> Job:
        """Every rank calls it, after ``init_process_group``; weights come from the seed, or from ``model.hf``."""
        parallel, optim = config.parallel, config.optim
        topology = Topology(ep=parallel.ep, shards=parallel.shards)
        mesh = ParallelMesh.create(topology, device)
        sizes = _model_config(config)
        slot_map = SlotMap.identity(sizes.num_moe_layers, sizes.num_experts, mesh.device)
        seed = None if config.model.hf else config.run.seed
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.run.dtype]
        model = build_model(sizes, mesh, slot_map=slot_map, dtype=dtype, seed=seed)
        if config.model.hf:
            from routepack_opt.integrations.torch_moe.huggingface.weights import load_hf

            load_hf(model, config.model.hf)
        optimizer = MoEAdamW(
            model,
            mesh,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            shard_expert_state=optim.shard_expert_state,
        )
        task = config.task
        return cls(
            config,
            mesh,
            slot_map,
            model,
            optimizer,
            ArithmeticTask(task.min_terms, task.max_terms, task.max_term, task.partial_credit),
        )

    def warm_start(self) -> float:
        """Supervised steps that teach the form of an answer; returns the last loss (0 without steps)."""
        settings, seed, mesh = self.config.task, self.config.run.seed, self.mesh
        self.optimizer.lr = settings.warm_start_lr
        loss = 0.0
        for step in range(settings.warm_start_steps):
            problems = self.task.examples(settings.warm_start_batch, seed=seed, step=step)
            own = range(mesh.rank, len(problems), mesh.num_ranks)
            loss = train_step(
                self.model,
                self.optimizer,
                mesh,
                [list(own)],
                {index: supervised_sample(problems[index].prompt, problems[index].answer) for index in own},
                supervised_loss,
                total_tokens=sum(len(problem.answer) for problem in problems),
                max_grad_norm=self.config.optim.max_grad_norm,
            ).loss
        self.optimizer.lr = self.config.optim.lr
        return loss

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return Path(self.config.run.out) / "checkpoints"

    def save(self, step: int) -> None:
        """Checkpoint after ``step`` optimizer steps; every rank calls it."""
        extra = {"config": self.config.to_table(), "step": step}
        save_checkpoint(
            self.checkpoints,
            step,
            self.model,
            self.optimizer,
            self.slot_map,
            self.mesh,
            extra,
            keep_last=self.config.run.keep,
            timeout_s=self.config.parallel.timeout_s,
        )

    def resume(self) -> int:
        """Load the newest checkpoint; returns the steps it has behind it. Every rank calls it.

        Raises
        ------
        InvalidInput
            There is none.
        FormatError
            It cannot be read, or belongs to a run with other settings; names the key.
        """
        folder = latest_checkpoint(self.checkpoints)
        if folder is None:
            raise InvalidInput(f"{self.checkpoints}: holds no checkpoint to resume from")
        extra = load_checkpoint(folder, self.model, self.optimizer, self.slot_map, self.mesh)
        check_same_run(extra.get("config"), self.config, str(folder))
        return int(extra["step"])


def check_same_run(saved: Any, config: RunConfig, where: str) -> None:
    """A resumed run goes on with the settings it began with, apart from those that change no result.

    Raises
    ------
    FormatError
        Names the first key that differs.
    """
    if not isinstance(saved, dict):
        raise FormatError(f"{where}: holds no settings of a training run")
    for section, values in config.to_table().items():
        before = saved.get(section, {})
        for name in sorted(set(values) | set(before)):
            free = name in _FREE_KEYS.get(section, ())
            if not free and before.get(name) != values.get(name):
                old, new = json.dumps(before.get(name)), json.dumps(values.get(name))
                raise FormatError(f"{where}: {section}.{name} was {old} and is {new} now; resume with what it was")


def _model_config(config: RunConfig) -> MoEConfig:
    if not config.model.hf:
        return MoEConfig(**config.model_sizes())
    from routepack_opt.integrations.torch_moe.huggingface.weights import config_from_hf

    sizes = config_from_hf(config.model.hf)
    if sizes.vocab_size < VOCAB_SIZE:
        raise InvalidInput(f"{config.model.hf}: vocab_size {sizes.vocab_size} is below the {VOCAB_SIZE} of the task")
    if sizes.num_experts % config.parallel.ep:
        raise InvalidInput(
            f"parallel.ep: {config.parallel.ep} does not divide the {sizes.num_experts} experts of {config.model.hf}"
        )
    return sizes
