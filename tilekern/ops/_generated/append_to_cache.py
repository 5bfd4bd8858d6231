"""append_to_cache, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(
    graded, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
    norm_last, interleaved
):
    key = (
        q.shape, q.dtype, q.get_device(), k.shape, k.dtype, k.get_device(), v.shape, v.dtype, v.get_device(), None
        if q_weight is None else (q_weight.shape, q_weight.dtype, q_weight.get_device()), None if k_weight is None
        else (k_weight.shape, k_weight.dtype, k_weight.get_device()), cos.shape, cos.dtype, cos.get_device(),
        sin.shape, sin.dtype, sin.get_device(), (keys.shape[:2], keys.shape[3:], keys.numel() > 0) if table is None
        else keys.shape, keys.dtype, keys.get_device(), values.shape == keys.shape, values.dtype,
        values.get_device(), positions.shape, positions.dtype, positions.get_device(), None if table is None else
        (table.shape, table.dtype, table.get_device()), rotary_dim, norm_last, interleaved, graded
    )
    try:
        return known[key]
    except KeyError:
        check(
            q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
            norm_last, interleaved
        )
        if not q.is_cuda:
            return find(
                graded, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset,
                rotary_dim, norm_last, interleaved
            )
        return keep(
            known, key, find(graded, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps,
            offset, rotary_dim, norm_last, interleaved)
        )


def fallback(
    q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim, norm_last,
    interleaved
):
    count_fallback(FORWARD)
    with uncast(q.device.type):
        return formula(
            q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
            norm_last, interleaved
        )


def refuse():
    raise RuntimeError("append_to_cache has no gradient, and one of its arguments requires one; call it under torch.no_grad(), or use tilekern.ops.qk_norm_rope or rope")


def append_to_cache(
    q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim, norm_last,
    interleaved
):
    if (
        is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or (q_weight is not None and
        q_weight.requires_grad) or (k_weight is not None and k_weight.requires_grad) or cos.requires_grad or
        sin.requires_grad or keys.requires_grad or values.requires_grad)
    ):
        refuse()
    if is_compiling() or transforms() or (modes() and not q.is_meta):
        check(
            q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
            norm_last, interleaved
        )
        if not is_compiling() and transforms():
            return fallback(
                q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
                norm_last, interleaved
            )
        return registered(
            q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
            norm_last, interleaved
        )
    plans = plans_of(
        False, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
        norm_last, interleaved
    )
    if plans is None:
        return fallback(
            q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
            norm_last, interleaved
        )
    try:
        return launch(
            plans, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
            norm_last, interleaved
        )
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(
            q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
            norm_last, interleaved
        )


def run(
    q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim, norm_last,
    interleaved
):
    plans = plans_of(
        False, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim,
        norm_last, interleaved
    )
    if plans is not None:
        try:
            return launch(
                plans, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset,
                rotary_dim, norm_last, interleaved
            )
        except NoVariant as error:
            refused(FORWARD, error)
    q_out = fallback(
        q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, table, eps, offset, rotary_dim, norm_last,
        interleaved
    )
    return q_out.contiguous()
