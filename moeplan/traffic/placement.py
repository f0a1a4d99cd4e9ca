"""Which layers of a config.json are MoE layers: every family has its own spelling of the rule."""

from moeplan.traffic.fields import Fields


def moe_indices(fields: Fields, layers: int) -> list[int]:
    """Indices of the MoE layers. Without a rule every layer is one.

    Raises MoeplanError where two rules are present and disagree, or a rule does not fit the number of layers.
    """
    rules = {
        "decoder_sparse_step": _sparse_step(fields, layers),
        "first_k_dense_replace": _first_dense(fields, layers),
        "moe_layers": fields.indices(layers, "moe_layers"),
        "interleave_moe_layer_step": _interleaved(fields, layers),
        "moe_layer_interval": _interval(fields, layers),
        "expert_layer_period": _period(fields, layers),
        "hybrid_override_pattern": _pattern(fields, layers),
    }
    present = [(key, rule) for key, rule in rules.items() if rule is not None]
    for key, rule in present[1:]:
        if rule != present[0][1]:
            raise fields.fail(f"{present[0][0]} gives {len(present[0][1])} MoE layers, {key} gives {len(rule)} others")
    chosen = present[0][1] if present else list(range(layers))
    if not chosen:
        raise fields.fail(f"{present[0][0]}: no layer is left as an MoE layer")
    return chosen


def _sparse_step(fields: Fields, layers: int) -> list[int] | None:
    step, dense = fields.whole("decoder_sparse_step"), fields.indices(layers, "mlp_only_layers")
    if step is None and dense is None:
        return None
    return [i for i in range(layers) if (i + 1) % (step or 1) == 0 and i not in (dense or [])]


def _first_dense(fields: Fields, layers: int) -> list[int] | None:
    first = fields.whole("first_k_dense_replace", least=0)
    rhythm = fields.first("moe_layer_freq")
    if first is None and rhythm is None:
        return None
    if isinstance(rhythm, list):  # one flag a layer
        flags = fields.per_layer(layers, "moe_layer_freq", least=0) or []
        return [i for i in range(first or 0, layers) if flags[i]]
    step = fields.whole("moe_layer_freq") or 1
    return [i for i in range(first or 0, layers) if i % step == 0]


def _interleaved(fields: Fields, layers: int) -> list[int] | None:
    step = fields.whole("interleave_moe_layer_step")
    return None if step is None else list(range(step - 1, layers, step))


def _interval(fields: Fields, layers: int) -> list[int] | None:
    start = fields.whole("moe_layer_start_index", least=0)
    step, end = fields.whole("moe_layer_interval"), fields.whole("moe_layer_end_index", least=-1)
    if start is None and step is None and end is None:
        return None
    last = layers - 1 if end in (None, -1) else end
    if last is not None and last >= layers:
        raise fields.fail(f"moe_layer_end_index = {last}, num_hidden_layers = {layers}")
    return [i for i in range(start or 0, (last or 0) + 1) if (i + 1) % (step or 1) == 0]


def _period(fields: Fields, layers: int) -> list[int] | None:
    period = fields.whole("expert_layer_period")
    if period is None:
        return None
    offset = fields.whole("expert_layer_offset", least=0) or 0
    return [i for i in range(layers) if i % period == offset]


def _pattern(fields: Fields, layers: int) -> list[int] | None:
    pattern = fields.one("hybrid_override_pattern")
    if pattern is None:
        return None
    if len(pattern) != layers:
        raise fields.fail(f"hybrid_override_pattern has {len(pattern)} entries, num_hidden_layers = {layers}")
    return [i for i, kind in enumerate(pattern) if kind == "E"]
