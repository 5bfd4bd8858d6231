"""jsd_loss, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, input, target, slope, beta, with_gradient, in_place):
    key = (
        input.shape, input.dtype, input.get_device(), target.shape, target.dtype, target.get_device(), slope.shape,
        slope.dtype, slope.get_device(), beta in (0, 1), with_gradient, graded
    )
    try:
        return known[key]
    except KeyError:
        check(input, target, slope, beta, with_gradient, in_place)
        if not input.is_cuda:
            return find(graded, input, target, slope, beta, with_gradient, in_place)
        return keep(known, key, find(graded, input, target, slope, beta, with_gradient, in_place))


def fallback(input, target, slope, beta, with_gradient, in_place):
    count_fallback(FORWARD)
    with uncast(input.device.type):
        return formula(input, target, slope, beta, with_gradient, in_place)


class JsdLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, target, slope, beta, with_gradient, in_place, plans):
        loss, gradient = launch(plans, input, target, slope, beta, with_gradient, in_place)
        ctx.save_for_backward(gradient, slope)
        ctx.plans = plans
        ctx.scalars = (beta, with_gradient, in_place)
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx, dloss):
        gradient, slope = ctx.saved_tensors
        try:
            dinput = launch_backward(ctx.plans, ctx.needs_input_grad, dloss, gradient, slope, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dinput = fallback_backward(dloss, gradient, slope, *ctx.scalars)
        return dinput, None, None, None, None, None, None


def jsd_loss(input, target, slope, beta, with_gradient, in_place):
    if is_compiling() or transforms() or (modes() and not input.is_meta):
        check(input, target, slope, beta, with_gradient, in_place)
        if not is_compiling() and transforms():
            return fallback(input, target, slope, beta, with_gradient, in_place)
        return registered(input, target, slope, beta, with_gradient, in_place)[0]
    graded = is_grad_enabled() and input.requires_grad
    plans = plans_of(graded, input, target, slope, beta, with_gradient, in_place)
    if plans is None or ((target.requires_grad or slope.requires_grad) and is_grad_enabled()):
        return fallback(input, target, slope, beta, with_gradient, in_place)
    try:
        if graded:
            return apply(input, target, slope, beta, with_gradient, in_place, plans)
        return launch(plans, input, target, slope, beta, with_gradient, in_place)[0]
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(input, target, slope, beta, with_gradient, in_place)


def fake_backward(dloss, gradient, slope, beta, with_gradient, in_place):
    dinput = gradient.new_empty(gradient.shape)
    return dinput


def run(input, target, slope, beta, with_gradient, in_place):
    plans = plans_of(False, input, target, slope, beta, with_gradient, in_place)
    if plans is not None:
        try:
            return launch(plans, input, target, slope, beta, with_gradient, in_place)
        except NoVariant as error:
            refused(FORWARD, error)
    loss = fallback(input, target, slope, beta, with_gradient, in_place)
    return loss.contiguous(), *rest(input, target, slope, beta, with_gradient, in_place)


def run_backward(dloss, gradient, slope, beta, with_gradient, in_place):
    plans = plans_of(True, gradient, gradient, slope, beta, with_gradient, in_place)
    if plans is None:
        count_fallback(BACKWARD)
        dinput = fallback_backward(dloss, gradient, slope, beta, with_gradient, in_place)
    else:
        try:
            dinput = launch_backward(
                plans, (True, True, True, True, True, True), dloss, gradient, slope, beta, with_gradient, in_place
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dinput = fallback_backward(dloss, gradient, slope, beta, with_gradient, in_place)
    return dinput


def save(ctx, inputs, output):
    input, target, slope, beta, with_gradient, in_place = inputs
    loss, gradient = output
    ctx.save_for_backward(gradient, slope)
    ctx.scalars = (beta, with_gradient, in_place)


def derive(ctx, dloss, dgradient):
    gradient, slope = ctx.saved_tensors
    dinput = registered_backward(dloss, gradient, slope, *ctx.scalars)
    return dinput, None, None, None, None, None
