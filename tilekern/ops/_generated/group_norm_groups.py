"""group_norm_groups, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, x, weight, bias, num_groups, eps):
    key = (
        x.shape, x.dtype, x.get_device(), weight.shape, weight.dtype, weight.get_device(), bias.shape, bias.dtype,
        bias.get_device(), num_groups, graded
    )
    try:
        return known[key]
    except KeyError:
        check(x, weight, bias, num_groups, eps)
        if not x.is_cuda:
            return find(graded, x, weight, bias, num_groups, eps)
        return keep(known, key, find(graded, x, weight, bias, num_groups, eps))


def fallback(x, weight, bias, num_groups, eps):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, weight, bias, num_groups, eps)


def fallback_backward(dy, x, weight, bias, num_groups, eps):
    dx, dweight, dbias = by_autograd(formula, (x, weight, bias, num_groups, eps), (0, 1, 2), (dy,))
    return dx, dweight, dbias


class GroupNormGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, num_groups, eps, plans):
        y = launch(plans, x, weight, bias, num_groups, eps)
        ctx.save_for_backward(x, weight, bias)
        ctx.plans = plans
        ctx.scalars = (num_groups, eps)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        try:
            dx, dweight, dbias = launch_backward(ctx.plans, ctx.needs_input_grad, dy, x, weight, bias, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight, dbias = fallback_backward(dy, x, weight, bias, *ctx.scalars)
        return dx, dweight, dbias, None, None, None


def group_norm_groups(x, weight, bias, num_groups, eps):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, weight, bias, num_groups, eps)
        if not is_compiling() and transforms():
            return fallback(x, weight, bias, num_groups, eps)
        return registered(x, weight, bias, num_groups, eps)
    graded = is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
    plans = plans_of(graded, x, weight, bias, num_groups, eps)
    if plans is None:
        return fallback(x, weight, bias, num_groups, eps)
    try:
        if graded:
            return apply(x, weight, bias, num_groups, eps, plans)
        return launch(plans, x, weight, bias, num_groups, eps)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, weight, bias, num_groups, eps)


def fake(x, weight, bias, num_groups, eps):
    y = x.new_empty(x.shape, dtype=promoted(x.dtype, weight.dtype, bias.dtype))
    return y


def fake_backward(dy, x, weight, bias, num_groups, eps):
    dx = x.new_empty(x.shape)
    dweight = weight.new_empty(weight.shape)
    dbias = bias.new_empty(bias.shape)
    return dx, dweight, dbias


def run(x, weight, bias, num_groups, eps):
    plans = plans_of(False, x, weight, bias, num_groups, eps)
    if plans is not None:
        try:
            return launch(plans, x, weight, bias, num_groups, eps)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, weight, bias, num_groups, eps)
    return y.contiguous()


def run_backward(dy, x, weight, bias, num_groups, eps):
    plans = plans_of(True, x, weight, bias, num_groups, eps)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight, dbias = fallback_backward(dy, x, weight, bias, num_groups, eps)
    else:
        try:
            dx, dweight, dbias = launch_backward(
                plans, (True, True, True, True, True), dy, x, weight, bias, num_groups, eps
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight, dbias = fallback_backward(dy, x, weight, bias, num_groups, eps)
    return dx, dweight.clone(), dbias.clone()


def save(ctx, inputs, output):
    x, weight, bias, num_groups, eps = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.scalars = (num_groups, eps)


def derive(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = registered_backward(dy, x, weight, bias, *ctx.scalars)
    return dx, dweight, dbias, None, None
