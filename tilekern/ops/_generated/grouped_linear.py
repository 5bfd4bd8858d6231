"""grouped_linear, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, x, weight, bias, offsets, order, slots, inner_first, partial):
    key = (
        x.shape, x.dtype, x.get_device(), weight.shape, weight.dtype, weight.get_device(), None if bias is None else
        (bias.shape, bias.dtype, bias.get_device()), offsets.shape, offsets.dtype, offsets.get_device(), None if
        order is None else (order.shape, order.dtype, order.get_device()), inner_first, partial, graded
    )
    try:
        return known[key]
    except KeyError:
        check(x, weight, bias, offsets, order, slots, inner_first, partial)
        if not x.is_cuda:
            return find(graded, x, weight, bias, offsets, order, slots, inner_first, partial)
        return keep(known, key, find(graded, x, weight, bias, offsets, order, slots, inner_first, partial))


def fallback(x, weight, bias, offsets, order, slots, inner_first, partial):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, weight, bias, offsets, order, slots, inner_first, partial)


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offsets, order, slots, inner_first, partial, plans):
        y = launch(plans, x, weight, bias, offsets, order, slots, inner_first, partial)
        ctx.save_for_backward(x, weight, bias, offsets, order)
        ctx.plans = plans
        ctx.scalars = (slots, inner_first, partial)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, weight, bias, offsets, order = ctx.saved_tensors
        try:
            dx, dweight, dbias = launch_backward(
                ctx.plans, ctx.needs_input_grad, dy, x, weight, bias, offsets, order, *ctx.scalars
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight, dbias = fallback_backward(dy, x, weight, bias, offsets, order, *ctx.scalars)
        return dx, dweight, dbias, None, None, None, None, None, None


def grouped_linear(x, weight, bias, offsets, order, slots, inner_first, partial):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, weight, bias, offsets, order, slots, inner_first, partial)
        if not is_compiling() and transforms():
            return fallback(x, weight, bias, offsets, order, slots, inner_first, partial)
        return registered(x, weight, bias, offsets, order, slots, inner_first, partial)
    graded = is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    graded = graded and (x.requires_grad, weight.requires_grad)
    plans = plans_of(graded, x, weight, bias, offsets, order, slots, inner_first, partial)
    if plans is None:
        return fallback(x, weight, bias, offsets, order, slots, inner_first, partial)
    try:
        if graded:
            return apply(x, weight, bias, offsets, order, slots, inner_first, partial, plans)
        return launch(plans, x, weight, bias, offsets, order, slots, inner_first, partial)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, weight, bias, offsets, order, slots, inner_first, partial)


def fake_backward(dy, x, weight, bias, offsets, order, slots, inner_first, partial, needs):
    dx = x.new_empty(x.shape) if needs[0] else dy.new_empty(0)
    dweight = weight.new_empty(weight.shape) if needs[1] else dy.new_empty(0)
    dbias = bias.new_empty(bias.shape) if needs[2] else dy.new_empty(0)
    return dx, dweight, dbias


def run(x, weight, bias, offsets, order, slots, inner_first, partial):
    plans = plans_of(False, x, weight, bias, offsets, order, slots, inner_first, partial)
    if plans is not None:
        try:
            return launch(plans, x, weight, bias, offsets, order, slots, inner_first, partial)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, weight, bias, offsets, order, slots, inner_first, partial)
    return y.contiguous()


def run_backward(dy, x, weight, bias, offsets, order, slots, inner_first, partial, needs):
    plans = plans_of((needs[0], needs[1]), x, weight, bias, offsets, order, slots, inner_first, partial)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight, dbias = fallback_backward(dy, x, weight, bias, offsets, order, slots, inner_first, partial)
    else:
        try:
            dx, dweight, dbias = launch_backward(
                plans, needs, dy, x, weight, bias, offsets, order, slots, inner_first, partial
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight, dbias = fallback_backward(
                dy, x, weight, bias, offsets, order, slots, inner_first, partial
            )
    return (
        dx if needs[0] else dy.new_empty(0), dweight if needs[1] else dy.new_empty(0), dbias if needs[2] else
        dy.new_empty(0)
    )


def save(ctx, inputs, output):
    x, weight, bias, offsets, order, slots, inner_first, partial = inputs
    ctx.save_for_backward(x, weight, bias, offsets, order)
    ctx.scalars = (slots, inner_first, partial)


def derive(ctx, dy):
    x, weight, bias, offsets, order = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:8])
    dx, dweight, dbias = registered_backward(dy, x, weight, bias, offsets, order, *ctx.scalars, needs)
    return (
        dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None, None, None, None,
        None, None
    )
