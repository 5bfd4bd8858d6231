"""dyt, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, x, alpha, gamma, beta):
    key = (
        x.shape, x.dtype, x.get_device(), alpha.shape, alpha.dtype, alpha.get_device(), gamma.shape, gamma.dtype,
        gamma.get_device(), None if beta is None else (beta.shape, beta.dtype, beta.get_device()), beta is not None,
        graded
    )
    try:
        return known[key]
    except KeyError:
        check(x, alpha, gamma, beta)
        if not x.is_cuda:
            return find(graded, x, alpha, gamma, beta)
        return keep(known, key, find(graded, x, alpha, gamma, beta))


def fallback(x, alpha, gamma, beta):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, alpha, gamma, beta)


def fallback_backward(dy, x, alpha, gamma, beta):
    dx, dalpha, dgamma, dbeta = by_autograd(formula, (x, alpha, gamma, beta), (0, 1, 2, 3), (dy,))
    return dx, dalpha, dgamma, dbeta


class Dyt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha, gamma, beta, plans):
        y = launch(plans, x, alpha, gamma, beta)
        ctx.save_for_backward(x, alpha, gamma, beta)
        ctx.plans = plans
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, alpha, gamma, beta = ctx.saved_tensors
        try:
            dx, dalpha, dgamma, dbeta = launch_backward(ctx.plans, ctx.needs_input_grad, dy, x, alpha, gamma, beta)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dalpha, dgamma, dbeta = fallback_backward(dy, x, alpha, gamma, beta)
        return dx, dalpha, dgamma, dbeta, None


def dyt(x, alpha, gamma, beta):
    if x.__class__ is not Tensor and is_dtensor(x, alpha, gamma, beta):
        return by_shards(dyt, (x,), (alpha, gamma, beta), gathered=1)
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, alpha, gamma, beta)
        if not is_compiling() and transforms():
            return fallback(x, alpha, gamma, beta)
        return registered(x, alpha, gamma, beta)
    graded = is_grad_enabled() and (
        x.requires_grad or alpha.requires_grad or gamma.requires_grad or (beta is not None and beta.requires_grad)
    )
    plans = plans_of(graded, x, alpha, gamma, beta)
    if plans is None:
        return fallback(x, alpha, gamma, beta)
    try:
        if graded:
            return apply(x, alpha, gamma, beta, plans)
        return launch(plans, x, alpha, gamma, beta)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, alpha, gamma, beta)


def fake(x, alpha, gamma, beta):
    y = x.new_empty(x.shape, dtype=promoted(x.dtype, alpha.dtype, gamma.dtype))
    return y


def fake_backward(dy, x, alpha, gamma, beta):
    dx = x.new_empty(x.shape)
    dalpha = alpha.new_empty(alpha.shape)
    dgamma = gamma.new_empty(gamma.shape)
    dbeta = dy.new_empty(0) if beta is None else beta.new_empty(beta.shape)
    return dx, dalpha, dgamma, dbeta


def run(x, alpha, gamma, beta):
    plans = plans_of(False, x, alpha, gamma, beta)
    if plans is not None:
        try:
            return launch(plans, x, alpha, gamma, beta)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, alpha, gamma, beta)
    return y.contiguous()


def run_backward(dy, x, alpha, gamma, beta):
    plans = plans_of(True, x, alpha, gamma, beta)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dalpha, dgamma, dbeta = fallback_backward(dy, x, alpha, gamma, beta)
    else:
        try:
            dx, dalpha, dgamma, dbeta = launch_backward(
                plans, (True, True, True, True), dy, x, alpha, gamma, beta
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dalpha, dgamma, dbeta = fallback_backward(dy, x, alpha, gamma, beta)
    return dx, dalpha, dgamma.clone(), dy.new_empty(0) if beta is None else dbeta.clone()


def save(ctx, inputs, output):
    x, alpha, gamma, beta = inputs
    ctx.save_for_backward(x, alpha, gamma, beta)
    ctx.scalars = ()


def derive(ctx, dy):
    x, alpha, gamma, beta = ctx.saved_tensors
    dx, dalpha, dgamma, dbeta = registered_backward(dy, x, alpha, gamma, beta, *ctx.scalars)
    return dx, dalpha, dgamma, None if beta is None else dbeta
