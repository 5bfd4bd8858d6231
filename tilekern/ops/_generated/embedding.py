"""embedding, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, ids, weight, positions, position_weight):
    key = (
        ids.shape, ids.dtype, ids.get_device(), weight.shape, weight.dtype, weight.get_device(), None if positions
        is None else (positions.shape, positions.dtype, positions.get_device()), None if position_weight is None
        else (position_weight.shape, position_weight.dtype, position_weight.get_device()), graded
    )
    try:
        return known[key]
    except KeyError:
        check(ids, weight, positions, position_weight)
        if not ids.is_cuda:
            return find(graded, ids, weight, positions, position_weight)
        return keep(known, key, find(graded, ids, weight, positions, position_weight))


def fallback(ids, weight, positions, position_weight):
    count_fallback(FORWARD)
    with uncast(ids.device.type):
        return formula(ids, weight, positions, position_weight)


def refuse():
    raise RuntimeError("embedding has no gradient, and one of its arguments requires one; call it under torch.no_grad(), or use torch.nn.functional.embedding")


def embedding(ids, weight, positions, position_weight):
    if (
        is_grad_enabled() and (weight.requires_grad or (position_weight is not None and
        position_weight.requires_grad))
    ):
        refuse()
    if is_compiling() or transforms() or (modes() and not ids.is_meta):
        check(ids, weight, positions, position_weight)
        if not is_compiling() and transforms():
            return fallback(ids, weight, positions, position_weight)
        return registered(ids, weight, positions, position_weight)
    plans = plans_of(False, ids, weight, positions, position_weight)
    if plans is None:
        return fallback(ids, weight, positions, position_weight)
    try:
        return launch(plans, ids, weight, positions, position_weight)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(ids, weight, positions, position_weight)


def run(ids, weight, positions, position_weight):
    plans = plans_of(False, ids, weight, positions, position_weight)
    if plans is not None:
        try:
            return launch(plans, ids, weight, positions, position_weight)
        except NoVariant as error:
            refused(FORWARD, error)
    out = fallback(ids, weight, positions, position_weight)
    return out.contiguous()
