"""curved, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(x, linear, cubic, erf, relu):
    if x.dim() < 1:
        raise ValueError(f"curved: x must have the shape [..., columns], got {list(x.shape)}")
    check_tensors("curved", x=x)


def find(graded, x, linear, cubic, erf, relu):
    if not x.numel():
        return None
    columns = x.shape[-1]
    sizes = (x.numel() // columns, columns, x.dtype, erf, relu)
    forward_plan = plan_for(FORWARD, x.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, x.device, *sizes)
        if backward_plan is None:
            return None
    index = x.get_device()
    flat = x.dim() == 2
    see = Rows if x.is_cuda else viewed
    rows = x.numel() // columns
    return (forward_plan, backward_plan, index, flat, see, rows, columns)


def plans_of(graded, x, linear, cubic, erf, relu):
    key = (x.shape, x.dtype, x.get_device(), erf, relu, graded)
    try:
        return known[key]
    except KeyError:
        check(x, linear, cubic, erf, relu)
        if not x.is_cuda:
            return find(graded, x, linear, cubic, erf, relu)
        return keep(known, key, find(graded, x, linear, cubic, erf, relu))


def launch(plans, x, linear, cubic, erf, relu):
    forward_plan, _, index, flat, see, rows, columns = plans
    x_whole = x.is_contiguous()
    y = empty_like(x) if x_whole else fresh(x)
    if flat:
        forward_plan.launch(
            index,
            x if x_whole else as_rows(x),
            y,
            float(linear),
            float(cubic),
        )
    else:
        forward_plan.launch(
            index,
            see(x, (rows, columns)) if x_whole else as_rows(x),
            see(y, (rows, columns)),
            float(linear),
            float(cubic),
        )
    return y


def launch_backward(plans, needs, dy, x, linear, cubic, erf, relu):
    _, backward_plan, index, flat, see, rows, columns = plans
    dy_whole = dy.is_contiguous()
    x_whole = x.is_contiguous()
    dx = empty_like(dy) if dy_whole else fresh(dy)
    if flat:
        backward_plan.launch(
            index,
            dy if dy_whole else as_rows(dy),
            x if x_whole else as_rows(x),
            dx,
            float(linear),
            float(cubic),
        )
    else:
        backward_plan.launch(
            index,
            see(dy, (rows, columns)) if dy_whole else as_rows(dy),
            see(x, (rows, columns)) if x_whole else as_rows(x),
            see(dx, (rows, columns)),
            float(linear),
            float(cubic),
        )
    return dx


def fallback(x, linear, cubic, erf, relu):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, linear, cubic, erf, relu)


def fallback_backward(dy, x, linear, cubic, erf, relu):
    (dx,) = by_autograd(formula, (x, linear, cubic, erf, relu), (0,), (dy,))
    return dx


class Curved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, linear, cubic, erf, relu, plans):
        y = launch(plans, x, linear, cubic, erf, relu)
        ctx.save_for_backward(x)
        ctx.plans = plans
        ctx.scalars = (linear, cubic, erf, relu)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        try:
            dx = launch_backward(ctx.plans, ctx.needs_input_grad, dy, x, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx = fallback_backward(dy, x, *ctx.scalars)
        return dx, None, None, None, None, None


def curved(x, linear, cubic, erf, relu):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, linear, cubic, erf, relu)
        if not is_compiling() and transforms():
            return fallback(x, linear, cubic, erf, relu)
        return registered(x, linear, cubic, erf, relu)
    graded = is_grad_enabled() and x.requires_grad
    plans = plans_of(graded, x, linear, cubic, erf, relu)
    if plans is None:
        return fallback(x, linear, cubic, erf, relu)
    try:
        if graded:
            return apply(x, linear, cubic, erf, relu, plans)
        return launch(plans, x, linear, cubic, erf, relu)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, linear, cubic, erf, relu)


def fake(x, linear, cubic, erf, relu):
    y = x.new_empty(x.shape, dtype=x.dtype)
    return y


def fake_backward(dy, x, linear, cubic, erf, relu):
    dx = x.new_empty(x.shape)
    return dx


def run(x, linear, cubic, erf, relu):
    plans = plans_of(False, x, linear, cubic, erf, relu)
    if plans is not None:
        try:
            return launch(plans, x, linear, cubic, erf, relu)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, linear, cubic, erf, relu)
    return y.contiguous()


def run_backward(dy, x, linear, cubic, erf, relu):
    plans = plans_of(True, x, linear, cubic, erf, relu)
    if plans is None:
        count_fallback(BACKWARD)
        dx = fallback_backward(dy, x, linear, cubic, erf, relu)
    else:
        try:
            dx = launch_backward(plans, (True, True, True, True, True), dy, x, linear, cubic, erf, relu)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx = fallback_backward(dy, x, linear, cubic, erf, relu)
    return dx


def save(ctx, inputs, output):
    x, linear, cubic, erf, relu = inputs
    ctx.save_for_backward(x)
    ctx.scalars = (linear, cubic, erf, relu)


def derive(ctx, dy):
    (x,) = ctx.saved_tensors
    dx = registered_backward(dy, x, *ctx.scalars)
    return dx, None, None, None, None
