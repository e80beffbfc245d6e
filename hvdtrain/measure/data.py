"""A scaling study as plain data for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hvdtrain.measure.sizes import Size
from hvdtrain.measure.study import Study


def study_data(study: Study) -> dict[str, Any]:
    """The same for programs: fractions, seconds, images per second."""
    data: dict[str, Any] = {
        "ok": True,
        "scaling": study.scaling,
        "sizes": [_size_data(one) for one in study.sizes],
        "runs": len(study.runs),
        "fit": None,
        "why_no_fit": study.why_no_fit or None,
        "predictions": [asdict(one) for one in study.predictions],
        "remedies": [
            {
                "name": one.name,
                "what": one.what,
                "efficiency": {
                    str(ranks): asdict(expected)
                    for ranks, expected in zip(study.remedies_at, one.efficiencies, strict=True)
                },
            }
            for one in study.remedies
        ],
        "passed_over": list(study.passed_over),
        "left_out": asdict(study.left_out) if study.left_out else None,
    }
    if study.fit:
        data["fit"] = {
            "base": study.fit.base,
            "efficiency_at_base": study.fit.at_base,
            "misfit": study.fit.misfit,
            "laws": [
                {"law": one.law.name, "weight": one.weight, **asdict(one.costs)}
                for one in study.fit.candidates
            ],
            "traffic": asdict(study.traffic) if study.traffic else None,
        }
    return data


def _size_data(one: Size) -> dict[str, Any]:
    rate = one.point.rate
    return {
        "ranks": one.ranks,
        "hosts": one.hosts,
        "runs": rate.count,
        "images_per_second_mean": rate.mean,
        "images_per_second_std": rate.deviation,
        "images_per_second_interval": rate.interval,
        "speedup": one.point.speedup,
        "efficiency": one.point.efficiency,
        "efficiency_interval": one.point.interval,
        "step_seconds": one.seconds,
        "step_split": dict(one.split) or None,
        "slowest": dict(zip(("rank", "share"), one.slowest, strict=True)) if one.slowest else None,
        "shares_cores": one.crowded,
    }
