"""sparsemax_rows, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(x):
    if x.dim() < 1:
        raise ValueError(f"sparsemax_rows: x must have the shape [..., columns], got {list(x.shape)}")
    check_tensors("sparsemax_rows", x=x)


def find(graded, x):
    if not x.numel():
        return None
    columns = x.shape[-1]
    sizes = (x.numel() // columns, columns, x.dtype)
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


def plans_of(graded, x):
    key = (x.shape, x.dtype, x.get_device(), graded)
    try:
        return known[key]
    except KeyError:
        check(x)
        if not x.is_cuda:
            return find(graded, x)
        return keep(known, key, find(graded, x))


def launch(plans, x):
    forward_plan, _, index, flat, see, rows, columns = plans
    x_whole = x.is_contiguous()
    y = empty_like(x) if x_whole else fresh(x)
    if flat:
        forward_plan.launch(
            index,
            x if x_whole else as_rows(x),
            y,
        )
    else:
        forward_plan.launch(
            index,
            see(x, (rows, columns)) if x_whole else as_rows(x),
            see(y, (rows, columns)),
        )
    return y


def launch_backward(plans, needs, dy, y):
    _, backward_plan, index, flat, see, rows, columns = plans
    dy_whole = dy.is_contiguous()
    y_whole = y.is_contiguous()
    dx = empty_like(dy) if dy_whole else fresh(dy)
    if flat:
        backward_plan.launch(
            index,
            dy if dy_whole else as_rows(dy),
            y if y_whole else as_rows(y),
            dx,
        )
    else:
        backward_plan.launch(
            index,
            see(dy, (rows, columns)) if dy_whole else as_rows(dy),
            see(y, (rows, columns)) if y_whole else as_rows(y),
            see(dx, (rows, columns)),
        )
    return dx


def fallback(x):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x)


class SparsemaxRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plans):
        y = launch(plans, x)
        ctx.save_for_backward(y)
        ctx.plans = plans
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        try:
            dx = launch_backward(ctx.plans, ctx.needs_input_grad, dy, y)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx = fallback_backward(dy, y)
        return dx, None


def sparsemax_rows(x):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x)
        if not is_compiling() and transforms():
            return fallback(x)
        return registered(x)
    graded = is_grad_enabled() and x.requires_grad
    plans = plans_of(graded, x)
    if plans is None:
        return fallback(x)
    try:
        if graded:
            return apply(x, plans)
        return launch(plans, x)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x)


def fake(x):
    y = x.new_empty(x.shape, dtype=x.dtype)
    return y


def fake_backward(dy, y):
    dx = y.new_empty(y.shape)
    return dx


def run(x):
    plans = plans_of(False, x)
    if plans is not None:
        try:
            return launch(plans, x)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x)
    return y.contiguous()


def run_backward(dy, y):
    plans = plans_of(True, y)
    if plans is None:
        count_fallback(BACKWARD)
        dx = fallback_backward(dy, y)
    else:
        try:
            dx = launch_backward(plans, (True,), dy, y)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx = fallback_backward(dy, y)
    return dx


def save(ctx, inputs, output):
    (x,) = inputs
    y = output
    ctx.save_for_backward(y)
    ctx.scalars = ()


def derive(ctx, dy):
    (y,) = ctx.saved_tensors
    dx = registered_backward(dy, y, *ctx.scalars)
    return dx
