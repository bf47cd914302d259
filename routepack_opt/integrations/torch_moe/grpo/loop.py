"""The training loop: sample, seal, plan, move experts, exchange samples, train; one optimizer step after another.

A step depends on the weights, the configuration and its own number only: every random number comes from (seed, step,
sample). A resumed run therefore repeats an undisturbed one bit for bit, provided plans do (``plan.budget_steps``).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.files import write_json
from routepack_opt.integrations.torch_moe.grpo.advantages import group_advantages
from routepack_opt.integrations.torch_moe.grpo.job import Job
from routepack_opt.integrations.torch_moe.grpo.loss import PolicyLoss, policy_sample
from routepack_opt.integrations.torch_moe.grpo.metrics import NAME as METRICS
from routepack_opt.integrations.torch_moe.grpo.metrics import MetricsWriter, read_metrics
from routepack_opt.integrations.torch_moe.grpo.placing import Placement, Placer
from routepack_opt.integrations.torch_moe.grpo.reference import ReferencePolicy
from routepack_opt.integrations.torch_moe.grpo.run_folder import claimed_folder
from routepack_opt.integrations.torch_moe.grpo.sampling import Rollout, sample_answers, sampling_uniforms
from routepack_opt.integrations.torch_moe.grpo.sealing import SealedWindow, seal_window
from routepack_opt.integrations.torch_moe.grpo.summary import RunSummary, summarise
from routepack_opt.integrations.torch_moe.grpo.timeline import Timeline
from routepack_opt.integrations.torch_moe.parallel.mesh import all_reduce_
from routepack_opt.integrations.torch_moe.step.exchange import exchange_samples, owners
from routepack_opt.integrations.torch_moe.step.train_step import StepResult, train_step

if TYPE_CHECKING:
    import threading

    from routepack_opt.integrations.torch_moe.grpo.run_config import RunConfig

logger = logging.getLogger(__name__)


def run_training(
    config: RunConfig, device: torch.device | str, *, resume: bool = False, stop: threading.Event | None = None
) -> RunSummary | None:
    """Train as ``config`` says; every rank calls it, after ``init_process_group``.

    Parameters
    ----------
    resume
        Go on from the newest checkpoint in ``run.out``.
    stop
        Set on any rank, it ends the run after the current step, with a checkpoint.

    Returns
    -------
    The summary on rank 0, None elsewhere.
    """
    job = Job.build(config, device)
    with claimed_folder(config.run.out, job.mesh, resume=resume) as out:
        return _run(replace(job, config=config.override(run__out=str(out))), resume=resume, stop=stop)


def _run(job: Job, *, resume: bool, stop: threading.Event | None) -> RunSummary | None:
    config, out = job.config, Path(job.config.run.out)
    first_step = job.resume() if resume else 0
    if first_step == 0:
        loss = job.warm_start()
        if job.mesh.rank == 0 and config.task.warm_start_steps:
            logger.info("warm start: %d supervised steps, loss %.3f", config.task.warm_start_steps, loss)
    writer = None
    if job.mesh.rank == 0:
        writer = MetricsWriter(out, first_step=first_step, tensorboard=config.run.tensorboard)
        write_json(out / "config.json", config.to_table(), indent=2)
    trainer = Trainer(job)
    interrupted = False
    if first_step >= config.run.steps:
        logger.info("%s: %d steps are done already, run.steps is %d", out, first_step, config.run.steps)
    for step in range(first_step, config.run.steps):
        values = trainer.step(step)
        if writer is not None:
            writer.write(step, values)
            _log_step(step, values, config.run.steps)
        interrupted = step + 1 < config.run.steps and trainer.agree_to_stop(stop)
        if interrupted:
            break
    if config.run.timeline_steps and trainer.steps_done:  # else the trace that is there stays
        trainer.timeline.write(out / "timeline.json", job.mesh)
    if writer is None:
        return None
    writer.close()
    summary = replace(summarise(read_metrics(out / METRICS), str(out)), interrupted=interrupted)
    write_json(out / "summary.json", summary.to_json(), indent=2)
    return summary


class Trainer:
    """Runs one optimizer step after another."""

    def __init__(self, job: Job) -> None:
        """Builds what outlives a step."""
        self.job = job
        config = job.config
        self.timeline = Timeline(config.run.timeline_steps)
        self.steps_done = self.saved_step = 0
        self.placer = Placer(job)
        optim = config.optim
        # one more model in memory, only where the KL term needs it
        self.reference = ReferencePolicy(config, job.mesh.device) if optim.kl_weight > 0 else None
        self.loss = PolicyLoss(optim.clip_low, optim.clip_high, optim.kl_weight, config.sampling.temperature)

    def step(self, step: int) -> dict[str, Any]:
        """Everything from sampling to the update, and the checkpoint if one is due; returns the metrics."""
        job, timeline = self.job, self.timeline
        start = time.perf_counter()
        timeline.begin_step(step)
        with timeline.span("sample"):
            rollouts, rewards = self._sample(step)
        with timeline.span("seal"):
            sealed = seal_window(
                rollouts,
                rewards,
                job.config.num_samples,
                job.model.config.num_experts,
                job.mesh,
                group_size=job.config.sampling.group_size,
                top_k=job.model.config.top_k,
            )
        placement = self.placer.place(sealed.window, step, timeline)
        result = self._train(rollouts, sealed, placement)
        self.placer.observe(placement, sum(result.seconds.values()))
        self.steps_done = step + 1
        every = job.config.run.checkpoint_every
        if self.steps_done == job.config.run.steps or (every and self.steps_done % every == 0):
            self._checkpoint()
        return self._metrics(sealed, placement, result, time.perf_counter() - start)

    def agree_to_stop(self, stop: threading.Event | None) -> bool:
        """Whether any rank was asked to stop; then the state is saved. Every rank calls it between steps."""
        mesh = self.job.mesh
        flag = torch.tensor([stop is not None and stop.is_set()], dtype=torch.int32, device=mesh.device)
        if not all_reduce_(flag, mesh.dp_group).item():
            return False
        if self.saved_step != self.steps_done:
            self._checkpoint()
        return True

    def _checkpoint(self) -> None:
        with self.timeline.span("checkpoint"):
            self.job.save(self.steps_done)
        self.saved_step = self.steps_done

    def _sample(self, step: int) -> tuple[dict[int, Rollout], dict[int, float]]:
        """This rank's samples and their rewards: prompts d, d + D, d + 2D ..."""
        job, settings = self.job, self.job.config.sampling
        problems = job.task.problems(settings.prompts, seed=job.config.run.seed, step=step)
        own = range(job.mesh.rank, settings.prompts, job.mesh.num_ranks)
        indices = [prompt * settings.group_size + k for prompt in own for k in range(settings.group_size)]
        asked = [problems[index // settings.group_size] for index in indices]
        answers = sample_answers(
            job.model,
            job.mesh,
            [problem.prompt for problem in asked],
            sampling_uniforms(indices, job.config.max_new_tokens, seed=job.config.run.seed, step=step),
            temperature=settings.temperature,
            max_new_tokens=job.config.max_new_tokens,
        )
        rewards = [job.task.reward(p, a.completion) for p, a in zip(asked, answers, strict=True)]
        return dict(zip(indices, answers, strict=True)), dict(zip(indices, rewards, strict=True))

    def _train(self, rollouts: dict[int, Rollout], sealed: SealedWindow, placement: Placement) -> StepResult:
        job, settings = self.job, self.job.config
        advantages = group_advantages(
            sealed.rewards, settings.sampling.group_size, scale=settings.optim.advantage_scale
        )
        reference: dict[int, Any] = {}
        if self.reference is not None:
            with self.timeline.span("reference"):
                reference = self.reference.log_probs(rollouts)
        with self.timeline.span("exchange"):
            mine = {
                index: policy_sample(rollout, advantages[index], reference.get(index))
                for index, rollout in rollouts.items()
            }
            samples = exchange_samples(mine, owners(placement.cells, len(advantages)), job.mesh)
        with self.timeline.span("train"):
            return train_step(
                job.model,
                job.optimizer,
                job.mesh,
                [list(row[job.mesh.rank]) for row in placement.cells],
                samples,
                self.loss,
                total_tokens=sealed.loss_tokens,
                max_grad_norm=settings.optim.max_grad_norm,
            )

    def _metrics(
        self, sealed: SealedWindow, placement: Placement, result: StepResult, seconds: float
    ) -> dict[str, Any]:
        loss_tokens = sealed.loss_tokens
        parts = self.timeline.seconds
        parts |= {f"train.{name}": value for name, value in result.seconds.items()}
        return {
            "reward": float(sealed.rewards.mean()),
            "exact": float((sealed.rewards == 1.0).mean()),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
            "clipped": result.metrics["clipped"] / loss_tokens,
            "kl": result.metrics["kl"] / loss_tokens,
            "entropy": result.metrics["entropy"] / loss_tokens,
            "tokens": int(sealed.window.lengths.sum()),
            "answer_tokens": loss_tokens,
            "rows": len(placement.cells),
            "placement_version": self.job.slot_map.version,
            **placement.facts,
            "seconds": round(seconds, 6),
            "seconds_by_part": {name: round(value, 6) for name, value in parts.items()},
        }


def _log_step(step: int, values: dict[str, Any], num_steps: int) -> None:
    if (step + 1) % 10 and step + 1 != num_steps and step:
        return
    logger.info(
        "step %d/%d: reward %.3f, loss %.4f, %d rows, %d experts moved, %.2f s",
        step + 1,
        num_steps,
        values["reward"],
        values["loss"],
        values["rows"],
        values.get("moved_experts", 0),
        values["seconds"],
    )
