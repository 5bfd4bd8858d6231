"""attention, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(
    graded, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
    deterministic
):
    key = (
        q.shape, q.dtype, q.get_device(), k.shape, k.dtype, k.get_device(), v.shape, v.dtype, v.get_device(), None
        if sinks is None else (sinks.shape, sinks.dtype, sinks.get_device()), None if cu_seqlens is None else
        (cu_seqlens.shape, cu_seqlens.dtype, cu_seqlens.get_device()), None if cu_seqlens_k is None else
        (cu_seqlens_k.shape, cu_seqlens_k.dtype, cu_seqlens_k.get_device()), causal, scale, window, softcap,
        max_seqlen, max_seqlen_k, deterministic, graded
    )
    try:
        return known[key]
    except KeyError:
        check(
            q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
            deterministic
        )
        if not q.is_cuda:
            return find(
                graded, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
                max_seqlen_k, deterministic
            )
        return keep(
            known, key, find(graded, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap,
            max_seqlen, max_seqlen_k, deterministic)
        )


def fallback(
    q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
    deterministic
):
    count_fallback(FORWARD)
    with uncast(q.device.type):
        return formula(
            q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
            deterministic
        )


def fallback_backward(
    dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
    max_seqlen_k, deterministic
):
    dq, dk, dv, dsinks = by_autograd(
        formula, (q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
        max_seqlen_k, deterministic), (0, 1, 2, 3), (dout,)
    )
    return dq, dk, dv, dsinks


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic, plans
    ):
        out, lse = launch(
            plans, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
            deterministic
        )
        ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k)
        ctx.plans = plans
        ctx.scalars = (causal, scale, window, softcap, max_seqlen, max_seqlen_k, deterministic)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
        try:
            dq, dk, dv, dsinks = launch_backward(
                ctx.plans, ctx.needs_input_grad, dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, *ctx.scalars
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk, dv, dsinks = fallback_backward(
                dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, *ctx.scalars
            )
        return dq, dk, dv, dsinks, None, None, None, None, None, None, None, None, None, None


def attention(
    q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
    deterministic
):
    if is_compiling() or transforms() or (modes() and not q.is_meta):
        check(
            q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
            deterministic
        )
        if not is_compiling() and transforms():
            return fallback(
                q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
                deterministic
            )
        return registered(
            q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
            deterministic
        )[0]
    graded = is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )
    plans = plans_of(
        graded, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic
    )
    if plans is None:
        return fallback(
            q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
            deterministic
        )
    try:
        if graded:
            return apply(
                q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
                deterministic, plans
            )
        return launch(
            plans, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
            max_seqlen_k, deterministic
        )[0]
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(
            q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
            deterministic
        )


def fake_backward(
    dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
    max_seqlen_k, deterministic
):
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    dsinks = dout.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return dq, dk, dv, dsinks


def run(
    q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
    deterministic
):
    plans = plans_of(
        False, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic
    )
    if plans is not None:
        try:
            return launch(
                plans, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
                max_seqlen_k, deterministic
            )
        except NoVariant as error:
            refused(FORWARD, error)
    out = fallback(
        q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic
    )
    return out.contiguous(), *rest(
        q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic
    )


def run_backward(
    dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
    max_seqlen_k, deterministic
):
    plans = plans_of(
        True, q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic
    )
    if plans is None:
        count_fallback(BACKWARD)
        dq, dk, dv, dsinks = fallback_backward(
            dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
            max_seqlen_k, deterministic
        )
    else:
        try:
            dq, dk, dv, dsinks = launch_backward(
                plans, (True, True, True, True, True, True, True, True, True, True, True, True, True), dout, q, k,
                v, out, lse, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen,
                max_seqlen_k, deterministic
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk, dv, dsinks = fallback_backward(
                dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap,
                max_seqlen, max_seqlen_k, deterministic
            )
    return dq, dk, dv, dout.new_empty(0) if sinks is None else dsinks


def save(ctx, inputs, output):
    (
        q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic
    ) = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k)
    ctx.scalars = (causal, scale, window, softcap, max_seqlen, max_seqlen_k, deterministic)


def derive(ctx, dout, dlse):
    q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
    dq, dk, dv, dsinks = registered_backward(
        dout, q, k, v, out, lse, sinks, cu_seqlens, cu_seqlens_k, *ctx.scalars
    )
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None, None, None, None, None
