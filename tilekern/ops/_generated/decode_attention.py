"""decode_attention, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned):
    key = (
        q.shape, q.dtype, q.get_device(), (keys.shape[:2], keys.numel() and bucket(keys.shape[-2]), keys.shape[3:])
        if table is None else keys.shape, keys.dtype, keys.get_device(), values.shape == keys.shape, values.dtype,
        values.get_device(), lengths.shape, lengths.dtype, lengths.get_device(), None if starts is None else
        (starts.shape, starts.dtype, starts.get_device()), None if table is None else (table.shape, table.dtype,
        table.get_device()), None if sinks is None else (sinks.shape, sinks.dtype, sinks.get_device()), scale is
        None or scale > 0, window, softcap, tuned, graded
    )
    try:
        return known[key]
    except KeyError:
        check(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
        if not q.is_cuda:
            return find(graded, q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
        return keep(
            known, key, find(graded, q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
        )


def fallback(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned):
    count_fallback(FORWARD)
    with uncast(q.device.type):
        return formula(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)


def refuse():
    raise RuntimeError("decode_attention has no gradient, and one of its arguments requires one; call it under torch.no_grad(), or use tilekern.ops.attention")


def decode_attention(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned):
    if (
        is_grad_enabled() and (q.requires_grad or keys.requires_grad or values.requires_grad or (sinks is not None
        and sinks.requires_grad))
    ):
        refuse()
    if is_compiling() or transforms() or (modes() and not q.is_meta):
        check(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
        if not is_compiling() and transforms():
            return fallback(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
        return registered(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
    plans = plans_of(False, q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
    if plans is None:
        return fallback(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
    try:
        return launch(plans, q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)


def fake(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned):
    out = q.new_empty(q.shape, dtype=promoted(q.dtype, keys.dtype, values.dtype))
    return out


def run(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned):
    plans = plans_of(False, q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
    if plans is not None:
        try:
            return launch(plans, q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
        except NoVariant as error:
            refused(FORWARD, error)
    out = fallback(q, keys, values, lengths, starts, table, sinks, scale, window, softcap, tuned)
    return out.contiguous()
