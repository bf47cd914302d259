"""Kernel of the hotness tracker: one pass over a window's demand."""

from __future__ import annotations

from routepack_opt.residency.simulator.stage_kernels import kernel


@kernel
def blend(demand, window, keep, first, forecast, hot, volatility, last_used):  # type: ignore[no-untyped-def]
    """forecast [L, E, C], hot [L, E] and volatility [L, E] after demand int32 [L, E, C]; ``first``: nothing before.

    last_used [L, E] becomes ``window`` where there were tokens.
    """
    num_layers, num_experts, num_chiplets = demand.shape
    fresh = 1.0 - keep
    for layer in range(num_layers):
        for e in range(num_experts):
            total = 0
            for c in range(num_chiplets):
                tokens = demand[layer, e, c]
                total += tokens
                if first:
                    forecast[layer, e, c] = tokens
                else:
                    forecast[layer, e, c] = keep * forecast[layer, e, c] + fresh * tokens
            if total > 0:
                last_used[layer, e] = window
            if first:
                hot[layer, e] = total
            else:
                away = abs(total - hot[layer, e])
                volatility[layer, e] = keep * volatility[layer, e] + fresh * away
                hot[layer, e] = keep * hot[layer, e] + fresh * total
