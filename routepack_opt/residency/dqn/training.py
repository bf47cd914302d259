"""Offline training: Double DQN over episodes, one window a step; the same seed gives the same bits."""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from routepack_opt.residency.control.run_windows import run_policy
from routepack_opt.residency.dqn import candidate_kernels as kernels
from routepack_opt.residency.dqn.candidates import CandidateMaker
from routepack_opt.residency.dqn.episodes import draw_episode, load_ground
from routepack_opt.residency.dqn.network import QNetwork, one_thread
from routepack_opt.residency.dqn.replay import ReplayMemory, Transition
from routepack_opt.residency.dqn.reward import Reward
from routepack_opt.residency.machine.package import Package

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.dqn.candidates import Candidates
    from routepack_opt.residency.dqn.episodes import Episode
    from routepack_opt.residency.dqn.replay import Batch
    from routepack_opt.residency.dqn.settings import Settings
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout

logger = logging.getLogger(__name__)
_CURVE_POINTS = 50
_CLIP_NORM = 10.0


@dataclass
class TrainingResult:
    """A trained network and how it came about.

    Parameters
    ----------
    network, settings
        As trained.
    workloads
        Name, shape and sha256 of every workload.
    curve
        Steps done, mean reward and mean loss since the point before.
    kinds
        Candidates chosen, by kind.
    steps, seconds
        Done, and wall time.
    """

    network: QNetwork
    settings: Settings
    workloads: list[dict[str, object]]
    curve: list[dict[str, float]] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0


class Learner:
    """Online and target network, optimiser, memory, and every generator of a run."""

    def __init__(self, settings: Settings) -> None:
        """First weights from the seed."""
        self.settings = settings
        weights, explore, draw = np.random.SeedSequence(settings.seed).spawn(3)
        self.explore, self._draw = np.random.default_rng(explore), np.random.default_rng(draw)
        self.network = QNetwork(hidden=settings.hidden, gains=settings.gains, rng=np.random.default_rng(weights))
        self._target = copy.deepcopy(self.network)
        self._optimiser = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate, foreach=False)
        self.memory = ReplayMemory(settings.memory)
        self.steps = self._updates = 0
        self.rewards: list[float] = []
        self.losses: list[float] = []
        self.kinds: dict[str, int] = {}

    @property
    def epsilon(self) -> float:
        """Share of random choices now."""
        settings = self.settings
        done = min(self.steps / max(settings.epsilon_share * settings.steps, 1.0), 1.0)
        return settings.epsilon_first + done * (settings.epsilon_last - settings.epsilon_first)

    def update(self) -> None:
        """One step of Adam on a batch, once the memory has enough."""
        if len(self.memory) < self.settings.warmup_steps:
            return
        left = 1.0 - self.steps / max(self.settings.steps, 1)
        for group in self._optimiser.param_groups:
            group["lr"] = self.settings.learning_rate * max(left, 0.05)
        loss = self._loss(self.memory.draw(self.settings.batch, self._draw))
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP_NORM, foreach=False)
        self._optimiser.step()
        self.losses.append(float(loss.detach()))
        self._updates += 1
        if self._updates % self.settings.target_steps == 0:
            self._target.load_state_dict(self.network.state_dict())

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Huber loss against r + discount * Q_target(s', argmax over the legal of Q(s'))."""
        rows = torch.from_numpy(batch.rows)[:, None]
        with torch.no_grad():
            features, legal = torch.from_numpy(batch.next_features), torch.from_numpy(batch.next_legal)
            best = self.network(features, legal).argmax(dim=1, keepdim=True)
            after = self._target(features, legal).gather(1, best)[:, 0]
            after = after.masked_fill(torch.from_numpy(batch.ended), 0.0)
            wanted = torch.from_numpy(batch.rewards) + self.settings.discount * after
        found = self.network(torch.from_numpy(batch.features), torch.from_numpy(batch.legal)).gather(1, rows)[:, 0]
        return torch.nn.functional.smooth_l1_loss(found, wanted)


class TrainingPolicy:
    """Epsilon-greedy over one episode; every decision is a step of the learner."""

    name = "dqn-training"
    mapping = "balance"
    max_edits: int | None = 1

    def __init__(self, learner: Learner, episode: Episode) -> None:
        """Both are the caller's."""
        self.learner, self.episode = learner, episode
        settings = learner.settings
        self._reward = Reward(episode.ground.scene, mu1=settings.mu1, mu2=settings.mu2)
        self._open: list[Transition] = []

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The episode's layout."""
        self._maker = CandidateMaker(scene)
        return start_layout

    def decide(self, view: PolicyView) -> list[Edit]:
        """Choose, measure the reward on the windows that follow, learn."""
        learner, settings = self.learner, self.learner.settings
        candidates = self._maker.make(view)
        self._close(candidates)
        row = self._choose(candidates)
        first = view.window + 1
        following = self.episode.windows[first : first + settings.reward_windows]
        reward = self._reward.of(view, candidates, row, following)
        self._open = [Transition(candidates, row, reward)]
        for other in self._side(candidates, row):
            self._open.append(Transition(candidates, other, self._reward.of(view, candidates, other, following)))
        self._maker.chosen(candidates, row, view.window)
        learner.rewards.append(reward)
        learner.kinds[candidates.kind(row)] = learner.kinds.get(candidates.kind(row), 0) + 1
        for _ in range(settings.updates):
            learner.update()
        learner.steps += 1
        return [candidates.edit(row)]

    def finish(self) -> None:
        """The episode is over."""
        self._close(None)

    def _close(self, after: Candidates | None) -> None:
        for transition in self._open:
            transition.after = after
            self.learner.memory.add(transition)
        self._open = []

    def _side(self, candidates: Candidates, row: int) -> list[int]:
        """Other legal copies, drawn without replacement."""
        kinds = candidates.edits[:, 1]
        copies = np.flatnonzero(candidates.legal & ((kinds == kernels.PROMOTE) | (kinds == kernels.DEMOTE)))
        copies = copies[copies != row]
        count = min(self.learner.settings.side, len(copies))
        return [int(i) for i in self.learner.explore.choice(copies, size=count, replace=False)] if count else []

    def _choose(self, candidates: Candidates) -> int:
        """A random legal candidate (of a random kind first: copies outnumber all else), or the best."""
        explore, legal = self.learner.explore, candidates.legal
        if explore.random() >= self.learner.epsilon:
            scores = self.learner.network.scores(candidates.features)
            return int(np.argmax(np.where(legal, scores, -np.inf)))
        kinds = candidates.edits[:, 1]
        kind = explore.choice(np.unique(kinds[legal]))
        return int(explore.choice(np.flatnonzero(legal & (kinds == kind))))


def train(
    settings: Settings,
    *,
    stop: threading.Event | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> TrainingResult:
    """Train a network.

    Parameters
    ----------
    settings
        All of them; the same settings (and traces) give the same weights, bit for bit, on one kind of machine.
    stop
        Ends the run after the current episode.
    progress
        Called after every point of the curve with steps done and mean reward.

    Raises
    ------
    RoutePackError
        A package, model or trace that cannot be used.
    """
    begun = time.perf_counter()
    package = Package.load(settings.package)
    grounds = [load_ground(package, work, settings.seed + at) for at, work in enumerate(settings.workload)]
    with one_thread():
        learner = Learner(settings)
        workloads: list[dict[str, object]] = [
            {"name": ground.name, "shape": list(ground.windows.shape), "sha256": ground.sha256} for ground in grounds
        ]
        result = TrainingResult(learner.network, settings, workloads)
        turn = 0
        while learner.steps < settings.steps and not (stop is not None and stop.is_set()):
            episode = draw_episode(grounds[turn % len(grounds)], settings, learner.explore)
            _play(learner, episode)
            turn += 1
            if len(learner.rewards) >= settings.steps / _CURVE_POINTS or learner.steps >= settings.steps:
                _add_point(result, learner)
                if progress is not None:
                    progress(learner.steps, result.curve[-1]["reward"])
    result.steps, result.kinds = learner.steps, dict(sorted(learner.kinds.items()))
    result.seconds = time.perf_counter() - begun
    return result


def _play(learner: Learner, episode: Episode) -> None:
    length = min(learner.settings.episode_windows, learner.settings.steps - learner.steps)
    policy = TrainingPolicy(learner, episode)
    windows: Sequence[NDArray[np.int32]] = episode.windows[:length]
    run_policy(episode.ground.scene, windows, policy, start=episode.start)
    policy.finish()


def _add_point(result: TrainingResult, learner: Learner) -> None:
    losses = float(np.mean(learner.losses)) if learner.losses else 0.0
    point = {"steps": learner.steps, "reward": float(np.mean(learner.rewards)), "loss": losses}
    result.curve.append(point)
    learner.rewards.clear()
    learner.losses.clear()
