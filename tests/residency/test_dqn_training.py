"""Training of the dqn policy: same bits from a seed, Double DQN targets, checkpoints, the command."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from routepack_opt.cli import main  # noqa: E402
from routepack_opt.errors import FormatError, InvalidInput, MissingDependency  # noqa: E402
from routepack_opt.residency.dqn.candidates import FEATURES, NUM_GAINS, Candidates  # noqa: E402
from routepack_opt.residency.dqn.checkpoint import SHIPPED, load_checkpoint, save_checkpoint  # noqa: E402
from routepack_opt.residency.dqn.network import QNetwork, one_thread  # noqa: E402
from routepack_opt.residency.dqn.replay import ReplayMemory, Transition  # noqa: E402
from routepack_opt.residency.dqn.settings import Settings, WorkloadSettings  # noqa: E402
from routepack_opt.residency.dqn.training import Learner, TrainingResult, train  # noqa: E402
from routepack_opt.residency.policies.dqn import Dqn  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

TINY = Settings(
    steps=48, workload=(WorkloadSettings("dbrx", "decode", num_windows=16),), episode_windows=8, reward_windows=2,
    warmup_steps=16, batch=8, hidden=16, target_steps=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> TrainingResult:
    return train(TINY)


def some_candidates(rng: np.random.Generator, count: int) -> Candidates:
    edits = rng.integers(0, 2, (count, 7))
    edits[0, -1] = 1
    features = rng.standard_normal((count, len(FEATURES))).astype(np.float32)
    return Candidates(edits, features, np.full((count, 2), -1))


def test_the_same_seed_gives_the_same_bits(trained: TrainingResult) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(123)  # the global generator is neither read nor moved
    mark = torch.random.get_rng_state()
    again = train(TINY)
    assert torch.equal(torch.random.get_rng_state(), mark)
    assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
    for name, value in trained.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name
    assert (again.curve, again.kinds, again.workloads) == (trained.curve, trained.kinds, trained.workloads)
    other = train(TINY.override(seed=1))
    assert not torch.equal(other.network.layer1_weight, trained.network.layer1_weight)
    assert other.workloads[0]["sha256"] != trained.workloads[0]["sha256"]


def test_a_run_counts_its_steps(trained: TrainingResult) -> None:
    assert trained.steps == TINY.steps == sum(trained.kinds.values())
    assert trained.curve[-1]["steps"] == TINY.steps


@pytest.mark.parametrize("gains", [True, False])
def test_scores_in_numpy_are_the_networks(gains: bool) -> None:
    rng = np.random.default_rng(0)
    network = QNetwork(hidden=16, gains=gains, rng=rng)
    found = some_candidates(rng, 9)
    scores = network.scores(found.features)
    wanted = network.advantage(torch.from_numpy(found.features)[None])[0][0].detach().numpy()
    np.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert scores[0] == 0.0
    blind = found.features.copy()
    blind[:, -NUM_GAINS:] += 1.0 + np.arange(len(blind))[:, None]
    assert gains or (network.scores(blind) == scores).all()


def test_values_are_masked_and_padding_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    network = QNetwork(hidden=16, rng=rng)
    memory = ReplayMemory(100)
    short, long = some_candidates(rng, 3), some_candidates(rng, 7)
    short.edits[0, 1] = long.edits[0, 1] = 0
    memory.add(Transition(short, 0, 1.0, long))
    batch = memory.draw(2, np.random.default_rng(0))
    values = network(torch.from_numpy(batch.next_features), torch.from_numpy(batch.next_legal))
    assert (torch.isinf(values[0]).detach().numpy() == ~long.legal).all()
    alone = network(torch.from_numpy(short.features)[None], torch.from_numpy(short.legal)[None])
    memory.add(Transition(long, 0, 1.0, None))
    padded = memory.draw(64, np.random.default_rng(0))
    assert padded.features.shape[1] == 7 and 0 < padded.ended.sum() < 64
    row = int(np.flatnonzero(~padded.ended)[0])
    found = network(torch.from_numpy(padded.features), torch.from_numpy(padded.legal))[row, :3]
    np.testing.assert_allclose(found.detach().numpy(), alone[0].detach().numpy(), rtol=1e-5)


def test_the_target_is_double_dqns() -> None:
    """r + discount * Q_target(s', argmax over the legal of Q(s')), nothing after the end."""
    rng = np.random.default_rng(2)
    learner = Learner(TINY.override(batch=1))
    learner._target = QNetwork(hidden=TINY.hidden, rng=np.random.default_rng(9))
    before, after = some_candidates(rng, 5), some_candidates(rng, 6)

    def values(network: QNetwork, found: Candidates) -> np.ndarray:
        inputs = torch.from_numpy(found.features)[None], torch.from_numpy(found.legal)[None]
        return network(*inputs)[0].detach().numpy()

    best = int(np.argmax(values(learner.network, after)))
    for end, next_value in ((None, 0.0), (after, values(learner._target, after)[best])):
        memory = ReplayMemory(1)
        memory.add(Transition(before, 0, 0.25, end))
        away = values(learner.network, before)[0] - (0.25 + TINY.discount * next_value)
        loss = 0.5 * away**2 if abs(away) < 1 else abs(away) - 0.5
        assert float(learner._loss(memory.draw(1, rng)).detach()) == pytest.approx(loss, rel=1e-4)


def test_the_memory_forgets_the_oldest_of_a_kind_and_draws_kinds_evenly() -> None:
    memory, one = ReplayMemory(15), some_candidates(np.random.default_rng(0), 2)
    one.edits[:, 1] = (0, 4)
    memory.add(Transition(one, 1, 9.0))
    for reward in range(5):
        memory.add(Transition(one, 0, float(reward)))
    assert len(memory) == 4
    rewards = memory.draw(400, np.random.default_rng(0)).rewards
    assert set(rewards) == {9.0, 2.0, 3.0, 4.0}
    assert 150 < (rewards == 9.0).sum() < 250


def test_learning_finds_the_better_candidate() -> None:
    """One state, two edits, rewards +1 and -1: the frozen choice is the first."""
    learner = Learner(TINY.override(batch=16, learning_rate=0.01, discount=0.0))
    found = some_candidates(np.random.default_rng(3), 3)
    found.edits[:, -1] = 1
    for row, reward in ((0, 0.0), (1, 1.0), (2, -1.0)):
        for _ in range(8):
            learner.memory.add(Transition(found, row, reward))
    with one_thread():
        for _ in range(200):
            learner.update()
    scores = learner.network.scores(found.features)
    assert np.argmax(scores) == 1 and scores[1] == pytest.approx(1.0, abs=0.2)


def test_checkpoint_round_trip(trained: TrainingResult, tmp_path: Path) -> None:
    record = save_checkpoint(trained, tmp_path / "net.safetensors")
    loaded = load_checkpoint(tmp_path / "net.safetensors")
    for name, value in trained.network.state_dict().items():
        assert torch.equal(value, loaded.network.state_dict()[name])
    assert loaded.settings == TINY and record.name == "net.json"
    for name in ("seed", "settings", "curve", "versions", "workloads", "weights_sha256", "features"):
        assert name in loaded.record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.json", "net.safetensors"]
    assert Dqn(tmp_path / "net.safetensors").margin == TINY.margin


def _change_record(folder: Path, **values: object) -> None:
    record = json.loads((folder / "net.json").read_text())
    (folder / "net.json").write_text(json.dumps(record | values))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "net.safetensors").unlink(), "no such checkpoint; train one with"),
        (lambda folder: (folder / "net.json").unlink(), "net.json: cannot be read"),
        (lambda folder: (folder / "net.json").write_text("{}"), "not the record of a"),
        (lambda folder: (folder / "net.json").write_text("[1"), "not valid JSON"),
        (lambda folder: _change_record(folder, settings=3), "settings: missing or not dict"),
        (lambda folder: _change_record(folder, settings={"steps": "x"}), "steps: expected int"),
        (lambda folder: _change_record(folder, settings={"pickle": 1}), "'pickle' is unknown"),
        (lambda folder: _change_record(folder, features=["hotness"]), "features: not those of this version"),
        (lambda folder: _change_record(folder, weights_sha256="0"), "sha256 differs"),
        (lambda folder: (folder / "net.safetensors").write_bytes(b"\x80\x04."), "no safetensors file"),
    ],
)
def test_damaged_checkpoints_are_refused(trained: TrainingResult, tmp_path: Path, spoil, message: str) -> None:
    save_checkpoint(trained, tmp_path / "net.safetensors")
    spoil(tmp_path)
    with pytest.raises(FormatError, match=message.replace("[", r"\[")) as refusal:
        Dqn(tmp_path / "net.safetensors")
    assert "\n" not in str(refusal.value)


def test_without_torch_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "routepack_opt.residency.dqn.network")
    with pytest.raises(MissingDependency, match="need torch; install it with"):
        Dqn()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 0", "steps: 0 is not a whole number >= 1"),
        ("discount = 1.0", "discount: 1.0 is not a number"),
        ("discount = nan", "discount: nan is not a number"),
        ("steps = true", "steps: expected int, found bool"),
        ("speed = 3", "'speed' is unknown"),
        ("steps = ", "not valid TOML"),
        ("workload = []", "workload: empty"),
        ("workload = 3", "workload: expected tables"),
        ("[[workload]]\nphase = 'decode'", r"workload\[0\]: 'model' is missing"),
        ("[[workload]]\nmodel = 'gpt'\nphase = 'decode'", r"workload\[0\].model: 'gpt' is unknown"),
        ("[[workload]]\nmodel = 'dbrx'\nphase = 'both'", r"workload\[0\].phase: 'both'"),
        ("[[workload]]\nmodel = 'dbrx'\nphase = 'decode'\nnum_windows = 3", "num_windows: 3 is below"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(InvalidInput, match=message) as refusal:
        Settings.load(tmp_path / "train.toml")
    assert "train.toml" in str(refusal.value) and "\n" not in str(refusal.value)


CONFIG = """
steps = 24
episode_windows = 6
reward_windows = 1
warmup_steps = 8
hidden = 8
[[workload]]
model = "dbrx"
phase = "decode"
num_windows = 10
"""


def test_the_command_writes_weights_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.toml").write_text(CONFIG)
    digests = []
    for name in ("a", "b"):
        output = tmp_path / f"{name}.safetensors"
        arguments = ["residency", "train", "--config", str(tmp_path / "train.toml"), "--seed", "3", "-o", str(output)]
        assert main([*arguments, "--json", "-q"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["seed"], document["steps"]) == (3, 24)
        digests.append(output.read_bytes())
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-o", "net.pt"), 4, "a checkpoint's name ends in .safetensors"),
        (("-o", "nowhere/net.safetensors"), 4, "no folder nowhere"),
        (("--models", "gpt", "-o", "net.safetensors"), 4, "'gpt' is unknown"),
        (("--config", "none.toml", "-o", "net.safetensors"), 4, "none.toml: cannot be read"),
        (("--steps", "0", "-o", "net.safetensors"), 2, "is not a whole number >= 1"),
        ((), 2, "--output"),
    ],
)
def test_the_command_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    try:
        found = main(["residency", "train", "-q", *arguments])
    except SystemExit as stop:
        found = int(stop.code or 0)
    err = capsys.readouterr().err
    assert found == code and message in err and err.count("\n") == 1


@pytest.mark.skipif(not SHIPPED.exists(), reason="no checkpoint is shipped")
def test_the_shipped_checkpoint_loads() -> None:
    loaded = load_checkpoint()
    assert SHIPPED.stat().st_size + SHIPPED.with_suffix(".json").stat().st_size < 200_000
    assert loaded.record["steps"] == loaded.settings.steps
    assert Dqn().name == "dqn"
