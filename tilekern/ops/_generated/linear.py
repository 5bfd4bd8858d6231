"""linear, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(x, weight, bias, activation):
    if x.dim() < 1:
        raise ValueError(f"linear: x must have the shape [..., in_features], got {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"linear: weight must have the shape [out_features, {x.shape[-1]}], got {list(weight.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"linear: bias must have the shape [{weight.shape[0]}], got {list(bias.shape)}")
    check_tensors("linear", x=x, weight=weight, bias=bias)


def plans_of(graded, x, weight, bias, activation):
    key = (
        x.shape, x.dtype, x.get_device(), weight.shape, weight.dtype, weight.get_device(), None if bias is None else
        (bias.shape, bias.dtype, bias.get_device()), activation, graded
    )
    try:
        return known[key]
    except KeyError:
        check(x, weight, bias, activation)
        if not x.is_cuda:
            return find(graded, x, weight, bias, activation)
        return keep(known, key, find(graded, x, weight, bias, activation))


def fallback(x, weight, bias, activation):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, weight, bias, activation)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation, plans):
        y = launch(plans, x, weight, bias, activation)
        ctx.save_for_backward(x, weight, bias)
        ctx.plans = plans
        ctx.scalars = (activation,)
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
        return dx, dweight, dbias, None, None


def linear(x, weight, bias, activation):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, weight, bias, activation)
        if not is_compiling() and transforms():
            return fallback(x, weight, bias, activation)
        return registered(x, weight, bias, activation)
    graded = is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    graded = graded and (x.requires_grad, weight.requires_grad)
    plans = plans_of(graded, x, weight, bias, activation)
    if plans is None:
        return fallback(x, weight, bias, activation)
    try:
        if graded:
            return apply(x, weight, bias, activation, plans)
        return launch(plans, x, weight, bias, activation)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, weight, bias, activation)


def fake(x, weight, bias, activation):
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=promoted(x.dtype, weight.dtype))
    return y


def fake_backward(dy, x, weight, bias, activation, needs):
    dx = x.new_empty(x.shape) if needs[0] else dy.new_empty(0)
    dweight = weight.new_empty(weight.shape) if needs[1] else dy.new_empty(0)
    dbias = bias.new_empty(bias.shape) if needs[2] else dy.new_empty(0)
    return dx, dweight, dbias


def run(x, weight, bias, activation):
    plans = plans_of(False, x, weight, bias, activation)
    if plans is not None:
        try:
            return launch(plans, x, weight, bias, activation)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, weight, bias, activation)
    return y.contiguous()


def run_backward(dy, x, weight, bias, activation, needs):
    plans = plans_of((needs[0], needs[1]), x, weight, bias, activation)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight, dbias = fallback_backward(dy, x, weight, bias, activation)
    else:
        try:
            dx, dweight, dbias = launch_backward(plans, needs, dy, x, weight, bias, activation)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight, dbias = fallback_backward(dy, x, weight, bias, activation)
    return (
        dx if needs[0] else dy.new_empty(0), dweight if needs[1] else dy.new_empty(0), dbias if needs[2] else
        dy.new_empty(0)
    )


def save(ctx, inputs, output):
    x, weight, bias, activation = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.scalars = (activation,)


def derive(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    dx, dweight, dbias = registered_backward(dy, x, weight, bias, *ctx.scalars, needs)
    return (dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None, None)
