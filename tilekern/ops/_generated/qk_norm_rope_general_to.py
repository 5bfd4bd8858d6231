"""qk_norm_rope_general_to, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def find(graded, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    if (
        not q.numel() or not k.numel() or not cos.numel() or k.dtype != q.dtype or k_weight.dtype != q_weight.dtype
        or sin.dtype != cos.dtype
    ):
        return None
    batch = q.shape[0]
    tokens = q.shape[1]
    heads = q.shape[2]
    head_dim = q.shape[3]
    kv_heads = k.shape[2]
    pairs = cos.shape[2]
    sizes = (
        tokens, batch, heads, kv_heads, head_dim, pairs, norm_last, interleaved, q.dtype, q_weight.dtype, cos.dtype
    )
    forward_plan = plan_for(FORWARD, q.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = sum_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, q.device, *sizes)
        if backward_plan is None:
            return None
        sum_plan = plan_for(SUM, q.device, backward_plan.blocks, 2 * head_dim, q_weight.dtype)
        if sum_plan is None:
            return None
    device = q.device
    index = q.get_device()
    return (forward_plan, backward_plan, sum_plan, device, index, head_dim)


def plans_of(graded, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    key = (
        q.shape, q.dtype, q.get_device(), k.shape, k.dtype, k.get_device(), q_weight.shape, q_weight.dtype,
        q_weight.get_device(), k_weight.shape, k_weight.dtype, k_weight.get_device(), cos.shape, cos.dtype,
        cos.get_device(), sin.shape, sin.dtype, sin.get_device(), norm_last, interleaved, graded
    )
    try:
        return known[key]
    except KeyError:
        check(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        if not q.is_cuda:
            return find(graded, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        return keep(
            known, key, find(graded, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        )


def launch(plans, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    forward_plan, _, _, _, index, _ = plans
    q_whole = q.is_contiguous()
    k_whole = k.is_contiguous()
    q_out = empty_like(q) if q_whole else fresh(q)
    k_out = empty_like(k) if k_whole else fresh(k)
    forward_plan.launch(
        index,
        q if q_whole else readable(q),
        k if k_whole else readable(k),
        q_weight if q_weight.is_contiguous() else q_weight.contiguous(),
        k_weight if k_weight.is_contiguous() else k_weight.contiguous(),
        cos if cos.is_contiguous() else readable(cos),
        sin if sin.is_contiguous() else readable(sin),
        float(eps),
        float(offset),
        q_out,
        k_out,
    )
    return q_out, k_out


def launch_backward(
    plans, needs, dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved
):
    _, backward_plan, sum_plan, device, index, head_dim = plans
    dq_out_whole = dq_out.is_contiguous()
    dk_out_whole = dk_out.is_contiguous()
    dq = empty_like(dq_out) if dq_out_whole else fresh(dq_out)
    dk = empty_like(dk_out) if dk_out_whole else fresh(dk_out)
    partial = empty(backward_plan.blocks, 2 * head_dim, dtype=float32, device=device)
    backward_plan.launch(
        index,
        dq_out if dq_out_whole else readable(dq_out),
        dk_out if dk_out_whole else readable(dk_out),
        q if q.is_contiguous() else readable(q),
        k if k.is_contiguous() else readable(k),
        q_weight if q_weight.is_contiguous() else q_weight.contiguous(),
        k_weight if k_weight.is_contiguous() else k_weight.contiguous(),
        cos if cos.is_contiguous() else readable(cos),
        sin if sin.is_contiguous() else readable(sin),
        float(eps),
        float(offset),
        dq,
        dk,
        partial,
    )
    if not needs[2] and not needs[3]:
        return dq, dk, None, None
    summed = empty(2 * head_dim, dtype=q_weight.dtype, device=device)
    sum_plan.launch(index, partial, summed)
    dq_weight, dk_weight = summed.chunk(2)
    return dq, dk, dq_weight, dk_weight


def fallback(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    count_fallback(FORWARD)
    with uncast(q.device.type):
        return formula(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)


def fallback_backward(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    dq, dk, dq_weight, dk_weight = by_autograd(
        formula, (q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved), (0, 1, 2, 3), (dq_out,
        dk_out)
    )
    return dq, dk, dq_weight, dk_weight


class QkNormRopeGeneralTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved, plans):
        q_out, k_out = launch(plans, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.plans = plans
        ctx.scalars = (eps, offset, norm_last, interleaved)
        return q_out, k_out

    @staticmethod
    @differentiable_once
    def backward(ctx, dq_out, dk_out):
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        try:
            dq, dk, dq_weight, dk_weight = launch_backward(
                ctx.plans, ctx.needs_input_grad, dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, *ctx.scalars
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk, dq_weight, dk_weight = fallback_backward(
                dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, *ctx.scalars
            )
        return dq, dk, dq_weight, dk_weight, None, None, None, None, None, None, None


def qk_norm_rope_general_to(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    if is_compiling() or transforms() or (modes() and not q.is_meta):
        check(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        if not is_compiling() and transforms():
            return fallback(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        return registered(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    graded = is_grad_enabled() and (
        q.requires_grad or k.requires_grad or q_weight.requires_grad or k_weight.requires_grad
    )
    plans = plans_of(graded, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    if plans is None or ((cos.requires_grad or sin.requires_grad) and is_grad_enabled()):
        return fallback(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    try:
        if graded:
            return apply(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved, plans)
        return launch(plans, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)


def fake(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    q_out = q.new_empty(q.shape, dtype=promoted(q.dtype, k.dtype))
    k_out = k.new_empty(k.shape, dtype=promoted(q.dtype, k.dtype))
    return q_out, k_out


def fake_backward(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dq_weight = q_weight.new_empty(q_weight.shape)
    dk_weight = k_weight.new_empty(k_weight.shape)
    return dq, dk, dq_weight, dk_weight


def run(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    plans = plans_of(False, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    if plans is not None:
        try:
            return launch(plans, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
        except NoVariant as error:
            refused(FORWARD, error)
    q_out, k_out = fallback(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    return q_out.contiguous(), k_out.contiguous()


def run_backward(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved):
    plans = plans_of(True, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    if plans is None:
        count_fallback(BACKWARD)
        dq, dk, dq_weight, dk_weight = fallback_backward(
            dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved
        )
    else:
        try:
            dq, dk, dq_weight, dk_weight = launch_backward(
                plans, (True, True, True, True, True, True, True, True, True, True), dq_out, dk_out, q, k, q_weight,
                k_weight, cos, sin, eps, offset, norm_last, interleaved
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk, dq_weight, dk_weight = fallback_backward(
                dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved
            )
    return dq, dk, dq_weight.clone(), dk_weight.clone()


def save(ctx, inputs, output):
    q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
    ctx.scalars = (eps, offset, norm_last, interleaved)


def derive(ctx, dq_out, dk_out):
    q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
    dq, dk, dq_weight, dk_weight = registered_backward(
        dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, *ctx.scalars
    )
    return dq, dk, dq_weight, dk_weight, None, None, None, None, None, None
