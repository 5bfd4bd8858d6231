"""llama4_rope_pairs, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def find(graded, q, k, angles):
    if not q.numel() or not k.numel() or not angles.numel() or k.dtype != q.dtype:
        return None
    batch = q.shape[0]
    tokens = q.shape[1]
    heads = q.shape[2]
    head_dim = q.shape[3]
    kv_heads = k.shape[2]
    sizes = (tokens, batch, heads, kv_heads, head_dim, False, q.dtype, angles.dtype)
    forward_plan = plan_for(FORWARD, q.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    if graded:
        sizes = (tokens, batch, heads, kv_heads, head_dim, True, q.dtype, angles.dtype)
        backward_plan = plan_for(BACKWARD, q.device, *sizes)
        if backward_plan is None:
            return None
    index = q.get_device()
    return (forward_plan, backward_plan, index)


def plans_of(graded, q, k, angles):
    key = (
        q.shape, q.dtype, q.get_device(), k.shape, k.dtype, k.get_device(), angles.shape, angles.dtype,
        angles.get_device(), graded
    )
    try:
        return known[key]
    except KeyError:
        check(q, k, angles)
        if not q.is_cuda:
            return find(graded, q, k, angles)
        return keep(known, key, find(graded, q, k, angles))


def launch(plans, q, k, angles):
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
        angles if angles.is_contiguous() else readable(angles),
        q_out,
        k_out,
    )
    return q_out, k_out


def launch_backward(plans, needs, dq_out, dk_out, angles):
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
        angles if angles.is_contiguous() else readable(angles),
        dq,
        dk,
    )
    return dq, dk


def fallback(q, k, angles):
    count_fallback(FORWARD)
    with uncast(q.device.type):
        return formula(q, k, angles)


class Llama4RopePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, angles, plans):
        q_out, k_out = launch(plans, q, k, angles)
        ctx.save_for_backward(angles)
        ctx.plans = plans
        return q_out, k_out

    @staticmethod
    @differentiable_once
    def backward(ctx, dq_out, dk_out):
        (angles,) = ctx.saved_tensors
        try:
            dq, dk = launch_backward(ctx.plans, ctx.needs_input_grad, dq_out, dk_out, angles)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk = fallback_backward(dq_out, dk_out, angles)
        return dq, dk, None, None


def llama4_rope_pairs(q, k, angles):
    if is_compiling() or transforms() or (modes() and not q.is_meta):
        check(q, k, angles)
        if not is_compiling() and transforms():
            return fallback(q, k, angles)
        return registered(q, k, angles)
    graded = is_grad_enabled() and (q.requires_grad or k.requires_grad)
    plans = plans_of(graded, q, k, angles)
    if plans is None or (angles.requires_grad and is_grad_enabled()):
        return fallback(q, k, angles)
    try:
        if graded:
            return apply(q, k, angles, plans)
        return launch(plans, q, k, angles)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(q, k, angles)


def fake(q, k, angles):
    q_out = empty_like(q, dtype=promoted(q.dtype, k.dtype))
    k_out = empty_like(k, dtype=promoted(q.dtype, k.dtype))
    return q_out, k_out


def fake_backward(dq_out, dk_out, angles):
    dq = empty_like(dq_out)
    dk = empty_like(dk_out)
    return dq, dk


def run(q, k, angles):
    plans = plans_of(False, q, k, angles)
    if plans is not None:
        try:
            return launch(plans, q, k, angles)
        except NoVariant as error:
            refused(FORWARD, error)
    q_out, k_out = fallback(q, k, angles)
    return q_out, k_out


def run_backward(dq_out, dk_out, angles):
    plans = plans_of(True, dq_out, dk_out, angles)
    if plans is None:
        count_fallback(BACKWARD)
        dq, dk = fallback_backward(dq_out, dk_out, angles)
    else:
        try:
            dq, dk = launch_backward(plans, (True, True, True), dq_out, dk_out, angles)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk = fallback_backward(dq_out, dk_out, angles)
    return dq, dk


def save(ctx, inputs, output):
    q, k, angles = inputs
    ctx.save_for_backward(angles)
    ctx.scalars = ()


def derive(ctx, dq_out, dk_out):
    (angles,) = ctx.saved_tensors
    dq, dk = registered_backward(dq_out, dk_out, angles, *ctx.scalars)
    return dq, dk, None
