"""Kernel of the hotness tracker: one pass over a window's demand."""

from __future__ import annotations

from routepack_opt.residency.stage_kernels import kernel


@kernel
def blend(demand, keep, first, forecast, hot, volatility):  # type: ignore[no-untyped-def]
    """forecast [L, E, C], hot [L, E] and volatility [L, E] after demand int32 [L, E, C]; ``first``: nothing before."""
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
            if first:
                hot[layer, e] = total
            else:
                away = abs(total - hot[layer, e])
                volatility[layer, e] = keep * volatility[layer, e] + fresh * away
                hot[layer, e] = keep * hot[layer, e] + fresh * total
