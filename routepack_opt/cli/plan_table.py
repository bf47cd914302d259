"""What ``routepack plan`` prints: the table of gains, the lines of proofs, and both as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routepack_opt.cli.output import plural, print_json, table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.plan import Plan
    from routepack_opt.report.gains import LayoutFigures
    from routepack_opt.window import Window


def print_result(
    options: argparse.Namespace, plan: Plan, window: Window, expert_bytes: int | None, previous: Plan | None
) -> None:
    """Compare the plan with what users run today, and say what is proved."""
    from routepack_opt.models.layout import simple_averaging_bound
    from routepack_opt.report.gains import baseline_figures, plan_figures

    averaging = simple_averaging_bound(window.lengths, window.total_load, plan.topology, plan.token_cap, plan.cost)
    figures = {
        **baseline_figures(plan, window, None if previous is None else previous.logical_to_slot),
        "plan": plan_figures(plan, window),
    }
    if options.json:
        print_json(_as_json(options.output, plan, figures, averaging, expert_bytes))
        return
    lines = [*_describe(plan, window), "", table(_gain_rows(figures, averaging)), "", *_proof_lines(plan)]
    lines.append(_moved_line(plan, window.num_experts, expert_bytes))
    lines += [f"note      {note}" for note in plan.notes]
    lines.append(f"wrote     {options.output}, planned in {plan.timings['total_s']:.2f} s")
    print("\n".join(lines))


def _as_json(
    output: str, plan: Plan, figures: dict[str, LayoutFigures], averaging: float, expert_bytes: int | None
) -> dict[str, Any]:
    moved = int(plan.moved_experts.sum())
    return {
        "plan": output,
        "rows": plan.rows,
        "rows_lower_bound": plan.rows_lower_bound,
        "rows_status": plan.rows_status,
        "score": list(plan.score),
        "seed_score": None if plan.seed_score is None else list(plan.seed_score),
        "seed_rows": plan.seed_rows,
        "bound": plan.bound,
        "gap": plan.gap,
        "averaging_bound": averaging,
        "above_averaging": plan.score.slowest_shard / averaging - 1.0 if averaging > 0 else None,
        "moved_experts": moved,
        "moved_share": moved / plan.logical_to_slot.size,
        "moved_bytes": None if expert_bytes is None else moved * expert_bytes,
        "figures": {name: value.to_json() for name, value in figures.items()},
        "timings": plan.timings,
        "notes": list(plan.notes),
    }


def _describe(plan: Plan, window: Window) -> list[str]:
    topology = plan.topology
    predicted = " (predicted counts)" if window.counts == "predicted" else ""
    return [
        f"window    {plural(window.num_samples, 'sample')}, {int(window.lengths.sum()):,} tokens,"
        f" {plural(window.num_layers, 'MoE layer')} x {window.num_experts} experts{predicted}",
        f"grid      {plural(plan.rows, 'row')} x {plural(topology.dp, 'DP rank')},"
        f" {plural(topology.num_shards, 'EDP shard')} of {plural(topology.ep, 'EP rank')},"
        f" token cap {plan.token_cap:,}",
    ]


def _gain_rows(figures: dict[str, LayoutFigures], averaging: float) -> list[list[str]]:
    values = list(figures.values())
    base, plan = values[0], values[-1]
    has_base = base is not plan

    def change(attribute: str) -> str:
        old, new = float(getattr(base, attribute)), float(getattr(plan, attribute))
        return f"{100 * (new / old - 1):+.2f}%" if has_base and old > 0 else ""

    rows = [["", *figures, f"plan vs {next(iter(figures))}" if has_base else ""]]
    rows.append(["rows", *(str(f.rows) for f in values), f"{plan.rows - base.rows:+d}" if has_base else ""])
    parts = [
        ("slowest shard", "slowest_shard", ".1f"),
        ("worst row", "worst_row", ".1f"),
        ("attention, all rows", "attention", ".1f"),
        ("experts, all rows", "experts", ".1f"),
        ("largest rank load", "peak", "d"),
    ]
    for title, attribute, form in parts:
        rows.append([title, *(format(getattr(f, attribute), f",{form}") for f in values), change(attribute)])
    if averaging > 0:
        above = [100 * (f.slowest_shard / averaging - 1) for f in values]
        rows.append(["above averaging bound", *(f"{v:.2f}%" for v in above), ""])
    rows.append(["EP efficiency eta", *(f"{f.eta_ep:.3f}" for f in values), ""])
    return rows


def _proof_lines(plan: Plan) -> list[str]:
    certificate = plan.certificates["rows"]
    if plan.rows_status == "certified":
        rows = f"{plan.rows} is the minimum: certified by an integer certificate ({certificate.get('kind', '')})"
    elif plan.rows_status == "solver-proved":
        name = f"{certificate.get('solver', '?')} {certificate.get('version', '')}".strip()
        rows = f"{plan.rows} is the minimum: proved by a solver ({name}), not re-checkable"
    else:
        rows = f"{plan.rows} best known; at least {plan.rows_lower_bound} needed"
    layers: list[dict[str, Any]] = plan.certificates["placement"]
    gaps = [layer["reached"] / layer["bound"] - 1 for layer in layers if layer["bound"]]
    mean = 100 * sum(gaps) / len(gaps) if gaps else 0.0
    slowest, bound = plan.score.slowest_shard, plan.bound
    return [
        f"rows      {rows}",
        f"layout    slowest shard {slowest:,.2f}; no placement and layout of {plural(plan.rows, 'row')} is below"
        f" {bound:,.2f}: at most {100 * plan.gap:.2f}% above the optimum",
        f"placement window load of the fullest EP rank {mean:.2f}% above its lower bound, mean over layers",
    ]


def _moved_line(plan: Plan, num_experts: int, expert_bytes: int | None) -> str:
    moved = int(plan.moved_experts.sum())
    total = plan.moved_experts.size * num_experts
    size = "bytes: give --model or --expert-bytes" if expert_bytes is None else _bytes(moved * expert_bytes)
    return f"moved     {moved:,} of {total:,} experts change EP rank ({100 * moved / total:.1f}%; {size})"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
