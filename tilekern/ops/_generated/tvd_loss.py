"""tvd_loss, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, p, q, slope, with_gradient, in_place):
    key = (
        p.shape, p.dtype, p.get_device(), q.shape, q.dtype, q.get_device(), slope.shape, slope.dtype,
        slope.get_device(), with_gradient, graded
    )
    try:
        return known[key]
    except KeyError:
        check(p, q, slope, with_gradient, in_place)
        if not p.is_cuda:
            return find(graded, p, q, slope, with_gradient, in_place)
        return keep(known, key, find(graded, p, q, slope, with_gradient, in_place))


def fallback(p, q, slope, with_gradient, in_place):
    count_fallback(FORWARD)
    with uncast(p.device.type):
        return formula(p, q, slope, with_gradient, in_place)


class TvdLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, q, slope, with_gradient, in_place, plans):
        loss, gradient = launch(plans, p, q, slope, with_gradient, in_place)
        ctx.save_for_backward(gradient, slope)
        ctx.plans = plans
        ctx.scalars = (with_gradient, in_place)
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx, dloss):
        gradient, slope = ctx.saved_tensors
        try:
            dp = launch_backward(ctx.plans, ctx.needs_input_grad, dloss, gradient, slope, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dp = fallback_backward(dloss, gradient, slope, *ctx.scalars)
        return dp, None, None, None, None, None


def tvd_loss(p, q, slope, with_gradient, in_place):
    if is_compiling() or transforms() or (modes() and not p.is_meta):
        check(p, q, slope, with_gradient, in_place)
        if not is_compiling() and transforms():
            return fallback(p, q, slope, with_gradient, in_place)
        return registered(p, q, slope, with_gradient, in_place)[0]
    graded = is_grad_enabled() and p.requires_grad
    plans = plans_of(graded, p, q, slope, with_gradient, in_place)
    if plans is None or ((q.requires_grad or slope.requires_grad) and is_grad_enabled()):
        return fallback(p, q, slope, with_gradient, in_place)
    try:
        if graded:
            return apply(p, q, slope, with_gradient, in_place, plans)
        return launch(plans, p, q, slope, with_gradient, in_place)[0]
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(p, q, slope, with_gradient, in_place)


def fake_backward(dloss, gradient, slope, with_gradient, in_place):
    dp = gradient.new_empty(gradient.shape)
    return dp


def run(p, q, slope, with_gradient, in_place):
    plans = plans_of(False, p, q, slope, with_gradient, in_place)
    if plans is not None:
        try:
            return launch(plans, p, q, slope, with_gradient, in_place)
        except NoVariant as error:
            refused(FORWARD, error)
    loss = fallback(p, q, slope, with_gradient, in_place)
    return loss.contiguous(), *rest(p, q, slope, with_gradient, in_place)


def run_backward(dloss, gradient, slope, with_gradient, in_place):
    plans = plans_of(True, gradient, gradient, slope, with_gradient, in_place)
    if plans is None:
        count_fallback(BACKWARD)
        dp = fallback_backward(dloss, gradient, slope, with_gradient, in_place)
    else:
        try:
            dp = launch_backward(
                plans, (True, True, True, True, True), dloss, gradient, slope, with_gradient, in_place
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dp = fallback_backward(dloss, gradient, slope, with_gradient, in_place)
    return dp


def save(ctx, inputs, output):
    p, q, slope, with_gradient, in_place = inputs
    loss, gradient = output
    ctx.save_for_backward(gradient, slope)
    ctx.scalars = (with_gradient, in_place)


def derive(ctx, dloss, dgradient):
    gradient, slope = ctx.saved_tensors
    dp = registered_backward(dloss, gradient, slope, *ctx.scalars)
    return dp, None, None, None, None
