"""The TOML file of a training run: sections, keys, ranges; every refusal names file and key."""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import read_text

if TYPE_CHECKING:
    import os

_HIGH = 2**31 - 1


def key(default: Any, doc: str, *, low: float | None = None, high: float = _HIGH, choices: tuple[str, ...] = ()) -> Any:
    """A key of the file: its default, what it means, and the values it may have.

    ``low`` None leaves numbers above 0 (exclusive); a default of None makes the key optional.
    """
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class ModelSection:
    """Sizes of the decoder, or a folder to load it from."""

    hf: str = key("", "folder of a Hugging Face model (Qwen3-MoE, Mixtral); the sizes below are then its own")
    hidden_size: int = key(64, "width of the residual stream", low=1)
    num_layers: int = key(2, "decoder layers", low=1)
    num_heads: int = key(4, "query heads", low=1)
    num_kv_heads: int = key(4, "key/value heads; divides num_heads", low=1)
    head_dim: int = key(16, "width of a head; even", low=2)
    num_experts: int = key(8, "routed experts of a MoE layer; ep divides it", low=1)
    top_k: int = key(2, "experts of a token", low=1)
    expert_size: int = key(64, "inner width of an expert", low=1)
    shared_size: int = key(0, "inner width of the shared expert; 0 for none", low=0)
    dense_layers: tuple[int, ...] = key((), "layers with a plain block instead of experts", low=0)
    dense_size: int = key(0, "inner width of those blocks", low=0)
    router: str = key("softmax", "scores of the router", choices=("softmax", "sigmoid"))
    qk_norm: bool = key(False, "RMSNorm of queries and keys")
    tie_embeddings: bool = key(False, "one matrix for embedding and output")


@dataclass(frozen=True)
class ParallelSection:
    """Processes and their groups."""

    ep: int = key(2, "EP ranks of a shard", low=1)
    shards: int = key(2, "EDP shards, each with all experts", low=1)
    processes: int | None = key(None, "processes of the job; ep x shards (default)", low=1)
    backend: str = key("auto", "communication; auto takes nccl where there are GPUs", choices=("auto", "gloo", "nccl"))
    threads: int = key(1, "CPU threads of a process", low=1)
    timeout_s: float = key(600.0, "longest wait for the other ranks")


@dataclass(frozen=True)
class TaskSection:
    """Problems, and the supervised steps before reinforcement learning starts."""

    min_terms: int = key(1, "fewest numbers of a sum", low=1)
    max_terms: int = key(3, "most numbers of a sum", low=1)
    max_term: int = key(4, "largest number; they start at 0", low=0)
    partial_credit: float = key(0.0, "reward of a right beginning, times its share of the answer", low=0, high=0.99)
    warm_start_steps: int = key(0, "supervised steps that teach the form of an answer", low=0)
    warm_start_batch: int = key(128, "problems of such a step, over all ranks", low=1)
    warm_start_lr: float = key(2e-3, "learning rate of these steps")


@dataclass(frozen=True)
class SamplingSection:
    """Rollouts of one optimizer step."""

    prompts: int = key(32, "prompts", low=1)
    group_size: int = key(8, "answers to each prompt; at least 2, a group is judged against itself", low=2)
    temperature: float = key(1.0, "of the softmax; training uses the same")
    max_new_tokens: int | None = key(None, "longest answer, end token counted; default: the task's longest", low=1)


@dataclass(frozen=True)
class OptimSection:
    """Optimizer and loss."""

    lr: float = key(1e-3, "learning rate", low=0)
    beta1: float = key(0.9, "Adam", low=0, high=0.999999)
    beta2: float = key(0.95, "Adam", low=0, high=0.999999)
    eps: float = key(1e-8, "Adam")
    weight_decay: float = key(0.0, "decoupled", low=0)
    max_grad_norm: float = key(1.0, "gradients above it are scaled down to it")
    clip_low: float = key(0.2, "ratios below 1 - clip_low get no gradient", low=0, high=1)
    clip_high: float = key(0.2, "ratios above 1 + clip_high get no gradient", low=0)
    kl_weight: float = key(0.0, "weight of the KL estimate to the policy after the warm start", low=0)
    advantage_scale: str = key("std", "divide by the group's standard deviation or not", choices=("std", "none"))
    shard_expert_state: bool = key(False, "split optimizer state of experts over the EDP shards")


@dataclass(frozen=True)
class PlanSection:
    """Planning of every optimizer step."""

    routepack: bool = key(True, "false: contiguous experts, first-fit rows, nothing moves (--no-routepack)")
    token_cap: int = key(512, "most tokens of a cell", low=1)
    budget_s: float = key(0.2, "seconds of planning a step", low=0)
    budget_steps: int | None = key(None, "proposals per chain instead: the same plan on every machine", low=0)
    seed: int = key(0, "of the planner; the step is added", low=0)
    planner: str = key(
        "rank0", "rank0 plans and broadcasts; every-rank plans the same", choices=("rank0", "every-rank")
    )
    overlap: bool = key(True, "move the first placement's experts while the planner still packs")
    late_moves: int | float | None = key(
        None, "most experts moved after packing: a count, or a share such as 0.1; default: all that pay", low=0
    )
    chunk_mib: float = key(64.0, "memory for experts on the way, MiB a rank")
    max_moved: float | None = key(None, "largest share of the experts that may change rank in a step", low=0, high=1)
    seconds_per_unit: float | None = key(None, "step time of a cost unit, weighs late moves; default: measured", low=0)
    seconds_per_expert: float | None = key(None, "wait for one late move; default: measured", low=0)


@dataclass(frozen=True)
class RunSection:
    """Length, seed and output."""

    steps: int = key(100, "optimizer steps", low=1)
    seed: int = key(0, "of weights, problems and sampling", low=0)
    out: str = key("run", "folder of metrics, timeline and checkpoints")
    checkpoint_every: int = key(0, "steps between checkpoints; 0: only after the last step", low=0)
    keep: int = key(2, "checkpoints kept", low=1)
    dtype: str = key("float32", "of weights; bfloat16 has float32 masters", choices=("float32", "bfloat16"))
    tensorboard: bool = key(False, "write TensorBoard events too")
    timeline_steps: int = key(20, "last steps shown in timeline.json; 0: none", low=0)


SECTIONS: dict[str, type[Any]] = {
    "model": ModelSection,
    "parallel": ParallelSection,
    "task": TaskSection,
    "sampling": SamplingSection,
    "optim": OptimSection,
    "plan": PlanSection,
    "run": RunSection,
}


@dataclass(frozen=True)
class RunConfig:
    """All sections of one run."""

    model: ModelSection = ModelSection()
    parallel: ParallelSection = ParallelSection()
    task: TaskSection = TaskSection()
    sampling: SamplingSection = SamplingSection()
    optim: OptimSection = OptimSection()
    plan: PlanSection = PlanSection()
    run: RunSection = RunSection()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunConfig:
        """Read and check a TOML file.

        Raises
        ------
        FormatError
            One line: the file, the key, what is wrong and what would be right.
        """
        try:
            table = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"{path}: not valid TOML ({error})") from None
        return cls.from_table(table, str(path))

    @classmethod
    def from_table(cls, table: dict[str, Any], where: str = "config") -> RunConfig:
        """From parsed TOML; ``where`` stands in front of every message."""
        for name in table:
            if name not in SECTIONS:
                raise FormatError(f"{where}: section [{name}] is unknown; expected {_listed(SECTIONS)}")
        parts = {name: _section(kind, name, table.get(name, {}), where) for name, kind in SECTIONS.items()}
        config = cls(**parts)
        config.check(where)
        return config

    def override(self, **changes: Any) -> RunConfig:
        """Another seed, step count or so: ``override(run__seed=3)``; None leaves a key as it is."""
        result = self
        for name, value in changes.items():
            section, _, entry = name.partition("__")
            if value is not None:
                result = replace(result, **{section: replace(getattr(result, section), **{entry: value})})
        return result

    @property
    def num_processes(self) -> int:
        """D."""
        return self.parallel.ep * self.parallel.shards

    @property
    def num_samples(self) -> int:
        """N of every window."""
        return self.sampling.prompts * self.sampling.group_size

    def check(self, where: str = "config") -> None:
        """What one key cannot tell alone."""

        def refuse(name: str, why: str) -> None:
            raise FormatError(f"{where}: {name}: {why}")

        model, parallel, task, plan = self.model, self.parallel, self.task, self.plan
        if parallel.processes not in (None, self.num_processes):
            product = f"ep x shards = {parallel.ep} x {parallel.shards} = {self.num_processes}"
            refuse("parallel.processes", f"{parallel.processes} does not equal {product}")
        if not model.hf and model.num_experts % parallel.ep:
            refuse("parallel.ep", f"{parallel.ep} does not divide model.num_experts = {model.num_experts}")
        if task.max_terms < task.min_terms:
            refuse("task.max_terms", f"{task.max_terms} is below task.min_terms = {task.min_terms}")
        if self.sampling.prompts < self.num_processes:
            refuse("sampling.prompts", f"{self.sampling.prompts} leave some of {self.num_processes} ranks without any")
        if plan.planner == "every-rank" and plan.budget_steps is None:
            refuse("plan.budget_steps", "planner = 'every-rank' needs it: seconds give each rank another plan")
        longest = task.max_terms * (len(str(task.max_term)) + 1) + self.max_new_tokens
        if plan.token_cap < longest:
            refuse("plan.token_cap", f"{plan.token_cap} is below the longest sample, {longest} tokens")
        if not self.run.out:
            refuse("run.out", "is empty; expected a folder")
        if not model.hf and set(range(model.num_layers)) <= set(model.dense_layers):
            refuse("model.dense_layers", "leave no layer with experts")
        if not model.hf:
            try:
                self.model_sizes()
            except InvalidInput as error:
                refuse("model", str(error).removeprefix("model config, "))

    @property
    def max_new_tokens(self) -> int:
        """Longest answer that is sampled."""
        task = self.task
        return self.sampling.max_new_tokens or len(str(task.max_terms * task.max_term)) + 1

    def model_sizes(self) -> dict[str, Any]:
        """Fields of MoEConfig (not for ``hf``); checks how they fit."""
        from routepack_opt.integrations.torch_moe.grpo.tokenizer import VOCAB_SIZE
        from routepack_opt.integrations.torch_moe.model.config import MoEConfig

        sizes = {entry.name: getattr(self.model, entry.name) for entry in fields(self.model) if entry.name != "hf"}
        sizes["vocab_size"] = VOCAB_SIZE
        MoEConfig(**sizes)
        return sizes

    def to_table(self) -> dict[str, dict[str, Any]]:
        """Sections as plain values without unset keys; ``from_table`` reads them back."""
        result: dict[str, dict[str, Any]] = {}
        for name in SECTIONS:
            section = getattr(self, name)
            values = {entry.name: getattr(section, entry.name) for entry in fields(section)}
            result[name] = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}
        return result


def _listed(names: Any) -> str:
    return ", ".join(f"[{name}]" for name in names)


def _section(kind: type[Any], name: str, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise FormatError(f"{where}: {name}: expected a section [{name}], found {values!r}")
    known = {entry.name: entry for entry in fields(kind)}
    hints = get_type_hints(kind)
    checked = {}
    for entry, value in values.items():
        if entry not in known:
            raise FormatError(f"{where}: {name}.{entry}: no such key; known are {', '.join(known)}")
        wanted = known[entry]
        assert wanted.default is not MISSING
        checked[entry] = _value(f"{where}: {name}.{entry}", hints[entry], wanted.metadata, value)
    return kind(**checked)


def _value(where: str, hint: Any, rule: Any, value: Any) -> Any:
    hint = {int | None: int, float | None: float}.get(hint, hint)
    if hint == int | float | None:  # a whole number counts, a fraction is a share
        hint = int if isinstance(value, int) else float
        rule = rule if hint is int else {**rule, "high": 1}
    if hint is bool:
        if not isinstance(value, bool):
            raise FormatError(f"{where}: expected true or false, found {value!r}")
        return value
    if hint is str:
        if not isinstance(value, str) or (rule["choices"] and value not in rule["choices"]):
            wanted = " or ".join(repr(c) for c in rule["choices"]) or "text"
            raise FormatError(f"{where}: expected {wanted}, found {value!r}")
        return value
    if hint == tuple[int, ...]:
        if not isinstance(value, list):
            raise FormatError(f"{where}: expected a list of whole numbers, found {value!r}")
        return tuple(_number(f"{where}[{place}]", int, rule, entry) for place, entry in enumerate(value))
    return _number(where, hint, rule, value)


def _number(where: str, hint: Any, rule: Any, value: Any) -> Any:
    low, high = rule["low"], rule["high"]
    whole = hint is int
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not -math.inf < value < math.inf or value > high or (value <= 0 if low is None else value < low):
        kind = "a whole number" if whole else "a number"
        wanted = f"{kind} above 0" if low is None else f"{kind} of at least {low}"
        top = "" if high == _HIGH else f" and at most {high}"
        raise FormatError(f"{where}: expected {wanted}{top}, found {value!r}")
    return value if whole else float(value)
