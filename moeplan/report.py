"""A plan as people and as engines read it: report.md and gates.toml. Everything comes from the plan document."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeplan.planning.words import listed
from moeplan.store import write_json, write_text
from moeplan.units import percent, seconds

SHOWN = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def write_plan(folder: Path, plan: Mapping[str, Any]) -> list[Path]:
    """plan.json, report.md and gates.toml in that folder, each written whole or not at all."""
    write_json(folder / "plan.json", plan)
    write_text(folder / "report.md", markdown(plan))
    write_text(folder / "gates.toml", toml(plan))
    return [folder / name for name in ("plan.json", "report.md", "gates.toml")]


def toml(plan: Mapping[str, Any]) -> str:
    """The thresholds alone. `above` runs where variable >= threshold; a gate without threshold is never passed."""
    lines = [
        "# `above` runs where variable >= threshold, `below` under it; without a threshold, always `below`.",
        f"model = {json.dumps(plan['model'])}",
        f"device = {json.dumps(plan['device'])}",
        f"engine = {json.dumps(plan['engine'])}",
        f"engine_version = {json.dumps(plan['keys']['engine_version'])}",
        f"routing = {json.dumps(plan['keys']['routing'])}",
    ]
    for gate in plan["gates"]:
        lines += ["", f"[{gate['name']}]" if gate["name"].isidentifier() else f"[{json.dumps(gate['name'])}]"]
        lines += [f"{key} = {json.dumps(gate[key])}" for key in ("variable", "below", "above")]
        lines += [f"{key} = {gate[name]}" for key, name in _LIMITS if gate[name] is not None]
    return "\n".join(lines) + "\n"


_LIMITS = (("threshold", "recommended"), ("default", "default"))


def markdown(plan: Mapping[str, Any]) -> str:
    """The report."""
    keys, mix = plan["keys"], plan["mix"]
    parts = [
        f"# Gates for {plan['model']} on {plan['device']}, engine {plan['engine']}",
        f"Calibration: {keys['runner']} {keys['engine_version']}, {keys['kind']}. Routing {keys['routing']},"
        f" {keys['cohort']} cohort. Clients {', '.join(map(str, mix['clients']))}, each {mix['rounds']} requests of"
        f" {mix['prompt_tokens']} prompt and {mix['max_tokens']} generated tokens; at most {mix['max_batch']} decode"
        f" together, {mix['max_prefill_batch']} prefill. Times are those of the expert path alone:"
        f" {sum(keys['layers'])} MoE layers in one step, attention, head and host not included.",
        "## Gates\n\n" + "\n".join(gate_lines(plan)),
        "## Path and time\n\n" + table(*ladder(plan)),
        *[f"## Gate `{gate['name']}`\n\n" + _gate(gate) for gate in plan["gates"]],
        "## Fits\n\n" + table(*fits(plan)),
    ]
    if plan["declines"]:
        parts.append("## Not planned\n\n" + "\n".join(f"- `{no['path']}`: {no['reason']}" for no in plan["declines"]))
    if plan["notes"]:
        parts.append("## What else decides in this engine\n\n" + "\n".join(f"- {note}" for note in plan["notes"]))
    return "\n\n".join(parts) + "\n"


def gate_lines(plan: Mapping[str, Any]) -> list[str]:
    """A line or two for each gate, and one for the whole."""
    lines = []
    for gate in plan["gates"]:
        old, new = _limit(gate["default"]), _limit(gate["recommended"])
        move = f"{old} -> {new}" if old != new else f"{old} (kept)"
        line = f"- `{gate['name']}` ({gate['below']} | {gate['above']}): {gate['variable']} {move}"
        if gate["changed_tokens"]:
            line += f", gain {band(gate)} at {_tokens(gate['changed_tokens'])}"
        if gate["break_even"] is not None:
            line += f"; break-even at {gate['break_even']:.4g} {gate['variable']}"
            if gate["variable"] != "tokens":
                line += f" ({gate['break_even_tokens']:.3g} tokens)"
        lines.append(f"{line}. {gate['reason'].capitalize()}.")
    whole = plan["total"]
    lines.append(
        f"- All steps of the mix ({whole['steps']} planned): {seconds(whole['default_s'])} ->"
        f" {seconds(whole['recommended_s'])}, {percent(whole['gain'])}; regret against the fastest path at every step"
        f" {whole['regret'] * 100:.2f} % (default {whole['default_regret'] * 100:.2f} %)."
    )
    return lines


def band(gain: Mapping[str, Any]) -> str:
    """`+9.1 % (+5.2 % .. +13.0 %)`."""
    return f"{percent(gain['gain'])} ({percent(gain['gain_low'])} .. {percent(gain['gain_high'])})"


def ladder(plan: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: path and time under the default and under the recommended gates."""
    sizes = {row["tokens"] for row in plan["predicted"] if row["steps"]} | {*SHOWN}
    edges = {gate["first_tokens"] for gate in plan["gates"] if gate["first_tokens"]}
    sizes |= edges | {edge - 1 for edge in edges}
    rows = [
        [
            str(row["tokens"]),
            row["default_path"],
            seconds(row["default_s"]),
            row["path"],
            seconds(row["seconds"]),
            f"{seconds(row['low'])} .. {seconds(row['high'])}",
            percent(row["default_s"] / row["seconds"] - 1) if row["path"] != row["default_path"] else "",
            row["source"],
        ]
        for row in plan["predicted"]
        if row["tokens"] in sizes
    ]
    return ["tokens", "default path", "time", "recommended path", "time", "band", "gain", "source"], rows


def fits(plan: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: how well each path is known."""
    rows = []
    for fit in plan["fits"]:
        if "reason" in fit:
            rows.append([fit["path"], f"no fit: {fit['reason']}", "", "", "", "", ""])
            continue
        held = [f"{fit[key] * 100:.2f} %" for key in ("holdout_mean", "holdout_p90")]
        edges = " .. ".join(percent(edge) for edge in fit["band"])
        valid = f"{fit['valid'][0]}..{fit['valid'][1]}"
        rows.append([fit["path"], fit["form"], fit["kind"], valid, *held, edges])
    return ["path", "seconds of a layer", "kind", "tokens", "held-out mean", "held-out p90", "band"], rows


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in [headings, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(headings), *lines[1:]])


def _gate(gate: Mapping[str, Any]) -> str:
    best = gate["optimum"]
    text = [
        f"`{gate['above']}` from {_limit(gate['default'])} {gate['variable']} on ({gate['source']}).",
        f"The mix alone would choose {_limit(best['threshold'])}: {band(best)} at {_tokens(best['changed_tokens'])}."
        if best["changed_tokens"]
        else f"The mix alone would choose {_limit(best['threshold'])}, which changes none of its steps.",
    ]
    text.append(stakes(gate))
    rows = [
        [
            str(row["tokens"]),
            str(row["value"]),
            f"{seconds(row['below']['seconds'])} ({row['below']['source']})",
            f"{seconds(row['above']['seconds'])} ({row['above']['source']})",
            percent(row["gain"]),
        ]
        for row in gate["evidence"]
        if row["tokens"] in _near(gate)
    ]
    moves = [
        f"- {move['routing']}, {move['cohort']} cohort: "
        + (move["reason"] if "reason" in move else f"optimum {_limit(move['optimum'])}, {band(move)};"
           f" with the floor {_limit(move['recommended'])}")
        for move in gate["robustness"]
    ]  # fmt: skip
    evidence = table(["tokens", gate["variable"], gate["below"], gate["above"], "second against first"], rows)
    return "\n\n".join([" ".join(text), evidence, "Under other assumptions:\n\n" + "\n".join(moves)])


def stakes(gate: Mapping[str, Any]) -> str:
    """What the default leaves on the table, a clause for each run of sizes with one source."""
    if not gate["evidence"]:
        return "The two paths have no size in common, so nothing is known about what the default costs."
    first, last = (gate["evidence"][i]["tokens"] for i in (0, -1))
    if not gate["stakes"]:
        return f"At {first}..{last} tokens the default always runs the faster of the two."
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in gate["stakes"]:
        grouped.setdefault((row["path"], row["source"]), []).append(row)
    clauses = []
    for (path, source), rows in grouped.items():
        sizes = _tokens([row["tokens"] for row in rows])
        gain, saving = (_span([row[key] for row in rows]) for key in ("gain", "saving"))
        how = "fitted, not measured" if source == "fitted" else source
        clauses.append(f"{gain} with `{path}` at {sizes} ({saving.replace('+', '')} of the time saved; {how})")
    text = f"What the default leaves at {first}..{last} tokens: {'; '.join(clauses)}; nothing elsewhere"
    if gate["default_tokens"] and max(row["tokens"] for row in gate["stakes"]) < gate["default_tokens"] <= last:
        text += f", in particular from {gate['default_tokens']} tokens on, where the default runs `{gate['above']}` too"
    return text + "."


def _span(values: Sequence[float]) -> str:
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} .. {high}"


def _near(gate: Mapping[str, Any]) -> set[int]:
    """Token counts worth a line: the sizes of SHOWN, and those around the break-even and both thresholds."""
    marks = [gate["first_tokens"], gate["break_even_tokens"]]
    return {*SHOWN} | {int(mark) + step for mark in marks if mark for step in (-1, 0, 1)}


def _tokens(tokens: Sequence[int]) -> str:
    return f"{listed(tokens)} token{'' if list(tokens) == [1] else 's'}"


def _limit(threshold: int | None) -> str:
    return "never" if threshold is None else str(threshold)
