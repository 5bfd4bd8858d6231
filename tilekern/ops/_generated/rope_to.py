"""rope_to, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def find(graded, q, k, cos, sin, full):
    if not q.numel() or not k.numel() or not cos.numel() or k.dtype != q.dtype or sin.dtype != cos.dtype:
        return None
    batch = q.shape[0]
    heads = q.shape[1]
    tokens = q.shape[2]
    head_dim = q.shape[3]
    kv_heads = k.shape[1]
    sizes = (tokens, batch, heads, kv_heads, head_dim, full, False, q.dtype, cos.dtype)
    forward_plan = plan_for(FORWARD, q.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    if graded:
        sizes = (tokens, batch, heads, kv_heads, head_dim, full, True, q.dtype, cos.dtype)
        backward_plan = plan_for(BACKWARD, q.device, *sizes)
        if backward_plan is None:
            return None
    index = q.get_device()
    return (forward_plan, backward_plan, index)


def plans_of(graded, q, k, cos, sin, full):
    key = (
        q.shape, q.dtype, q.get_device(), k.shape, k.dtype, k.get_device(), cos.shape, cos.dtype, cos.get_device(),
        sin.shape, sin.dtype, sin.get_device(), full, graded
    )
    try:
        return known[key]
    except KeyError:
        check(q, k, cos, sin, full)
        if not q.is_cuda:
            return find(graded, q, k, cos, sin, full)
        return keep(known, key, find(graded, q, k, cos, sin, full))


def launch(plans, q, k, cos, sin, full):
    forward_plan, _, index = plans
    if not q.is_contiguous():
        q = readable(q)
    if not k.is_contiguous():
        k = readable(k)
    q_out = empty_like(q)
    k_out = empty_like(k)
    forward_plan.launch(
        index,
        q,
        k,
        cos if cos.is_contiguous() else readable(cos),
        sin if sin.is_contiguous() else readable(sin),
        q_out,
        k_out,
    )
    return q_out, k_out


def launch_backward(plans, needs, dq_out, dk_out, cos, sin, full):
    _, backward_plan, index = plans
    if not dq_out.is_contiguous():
        dq_out = readable(dq_out)
    if not dk_out.is_contiguous():
        dk_out = readable(dk_out)
    dq = empty_like(dq_out)
    dk = empty_like(dk_out)
    backward_plan.launch(
        index,
        dq_out,
        dk_out,
        cos if cos.is_contiguous() else readable(cos),
        sin if sin.is_contiguous() else readable(sin),
        dq,
        dk,
    )
    return dq, dk


def fallback(q, k, cos, sin, full):
    count_fallback(FORWARD)
    with uncast(q.device.type):
        return formula(q, k, cos, sin, full)


class RopeTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, full, plans):
        q_out, k_out = launch(plans, q, k, cos, sin, full)
        ctx.save_for_backward(cos, sin)
        ctx.plans = plans
        ctx.scalars = (full,)
        return q_out, k_out

    @staticmethod
    @differentiable_once
    def backward(ctx, dq_out, dk_out):
        cos, sin = ctx.saved_tensors
        try:
            dq, dk = launch_backward(ctx.plans, ctx.needs_input_grad, dq_out, dk_out, cos, sin, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk = fallback_backward(dq_out, dk_out, cos, sin, *ctx.scalars)
        return dq, dk, None, None, None, None


def rope_to(q, k, cos, sin, full):
    if is_compiling() or transforms() or (modes() and not q.is_meta):
        check(q, k, cos, sin, full)
        if not is_compiling() and transforms():
            return fallback(q, k, cos, sin, full)
        return registered(q, k, cos, sin, full)
    graded = is_grad_enabled() and (q.requires_grad or k.requires_grad)
    plans = plans_of(graded, q, k, cos, sin, full)
    if plans is None or ((cos.requires_grad or sin.requires_grad) and is_grad_enabled()):
        return fallback(q, k, cos, sin, full)
    try:
        if graded:
            return apply(q, k, cos, sin, full, plans)
        return launch(plans, q, k, cos, sin, full)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(q, k, cos, sin, full)


def fake(q, k, cos, sin, full):
    q_out = empty_like(q, dtype=promoted(q.dtype, k.dtype))
    k_out = empty_like(k, dtype=promoted(q.dtype, k.dtype))
    return q_out, k_out


def fake_backward(dq_out, dk_out, cos, sin, full):
    dq = empty_like(dq_out)
    dk = empty_like(dk_out)
    return dq, dk


def run(q, k, cos, sin, full):
    plans = plans_of(False, q, k, cos, sin, full)
    if plans is not None:
        try:
            return launch(plans, q, k, cos, sin, full)
        except NoVariant as error:
            refused(FORWARD, error)
    q_out, k_out = fallback(q, k, cos, sin, full)
    return q_out, k_out


def run_backward(dq_out, dk_out, cos, sin, full):
    plans = plans_of(True, dq_out, dk_out, cos, sin, full)
    if plans is None:
        count_fallback(BACKWARD)
        dq, dk = fallback_backward(dq_out, dk_out, cos, sin, full)
    else:
        try:
            dq, dk = launch_backward(plans, (True, True, True, True, True), dq_out, dk_out, cos, sin, full)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk = fallback_backward(dq_out, dk_out, cos, sin, full)
    return dq, dk


def save(ctx, inputs, output):
    q, k, cos, sin, full = inputs
    ctx.save_for_backward(cos, sin)
    ctx.scalars = (full,)


def derive(ctx, dq_out, dk_out):
    cos, sin = ctx.saved_tensors
    dq, dk = registered_backward(dq_out, dk_out, cos, sin, *ctx.scalars)
    return dq, dk, None, None, None
