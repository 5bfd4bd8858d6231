"""rope_part, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, q, k, cos, sin, full, rotary, interleaved):
    key = (
        q.shape, q.dtype, q.get_device(), k.shape, k.dtype, k.get_device(), cos.shape, cos.dtype, cos.get_device(),
        sin.shape, sin.dtype, sin.get_device(), full, rotary, interleaved, graded
    )
    try:
        return known[key]
    except KeyError:
        check(q, k, cos, sin, full, rotary, interleaved)
        if not q.is_cuda:
            return find(graded, q, k, cos, sin, full, rotary, interleaved)
        return keep(known, key, find(graded, q, k, cos, sin, full, rotary, interleaved))


def fallback(q, k, cos, sin, full, rotary, interleaved):
    count_fallback(FORWARD)
    with uncast(q.device.type):
        return formula(q, k, cos, sin, full, rotary, interleaved)


class RopePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, full, rotary, interleaved, plans):
        q_out, k_out = launch(plans, q, k, cos, sin, full, rotary, interleaved)
        ctx.save_for_backward(cos, sin)
        ctx.plans = plans
        ctx.scalars = (full, rotary, interleaved)
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
        return dq, dk, None, None, None, None, None, None


def rope_part(q, k, cos, sin, full, rotary, interleaved):
    if is_compiling() or transforms() or (modes() and not q.is_meta):
        check(q, k, cos, sin, full, rotary, interleaved)
        if not is_compiling() and transforms():
            return fallback(q, k, cos, sin, full, rotary, interleaved)
        return registered(q, k, cos, sin, full, rotary, interleaved)
    graded = is_grad_enabled() and (q.requires_grad or k.requires_grad)
    plans = plans_of(graded, q, k, cos, sin, full, rotary, interleaved)
    if plans is None or ((cos.requires_grad or sin.requires_grad) and is_grad_enabled()):
        return fallback(q, k, cos, sin, full, rotary, interleaved)
    try:
        if graded:
            return apply(q, k, cos, sin, full, rotary, interleaved, plans)
        return launch(plans, q, k, cos, sin, full, rotary, interleaved)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(q, k, cos, sin, full, rotary, interleaved)


def fake(q, k, cos, sin, full, rotary, interleaved):
    q_out = empty_like(q, dtype=promoted(q.dtype, k.dtype, cos.dtype, sin.dtype))
    k_out = empty_like(k, dtype=promoted(q.dtype, k.dtype, cos.dtype, sin.dtype))
    return q_out, k_out


def fake_backward(dq_out, dk_out, cos, sin, full, rotary, interleaved):
    dq = empty_like(dq_out)
    dk = empty_like(dk_out)
    return dq, dk


def run(q, k, cos, sin, full, rotary, interleaved):
    plans = plans_of(False, q, k, cos, sin, full, rotary, interleaved)
    if plans is not None:
        try:
            return launch(plans, q, k, cos, sin, full, rotary, interleaved)
        except NoVariant as error:
            refused(FORWARD, error)
    q_out, k_out = fallback(q, k, cos, sin, full, rotary, interleaved)
    return q_out, k_out


def run_backward(dq_out, dk_out, cos, sin, full, rotary, interleaved):
    plans = plans_of(True, dq_out, dk_out, cos, sin, full, rotary, interleaved)
    if plans is None:
        count_fallback(BACKWARD)
        dq, dk = fallback_backward(dq_out, dk_out, cos, sin, full, rotary, interleaved)
    else:
        try:
            dq, dk = launch_backward(
                plans, (True, True, True, True, True, True, True), dq_out, dk_out, cos, sin, full, rotary,
                interleaved
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dq, dk = fallback_backward(dq_out, dk_out, cos, sin, full, rotary, interleaved)
    return dq, dk


def save(ctx, inputs, output):
    q, k, cos, sin, full, rotary, interleaved = inputs
    ctx.save_for_backward(cos, sin)
    ctx.scalars = (full, rotary, interleaved)


def derive(ctx, dq_out, dk_out):
    cos, sin = ctx.saved_tensors
    dq, dk = registered_backward(dq_out, dk_out, cos, sin, *ctx.scalars)
    return dq, dk, None, None, None, None, None
