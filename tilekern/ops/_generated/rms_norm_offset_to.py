"""rms_norm_offset_to, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(x, weight, eps, offset, cast, dtype):
    if x.dim() < 1:
        raise ValueError(f"rms_norm_offset_to: x must have the shape [..., columns], got {list(x.shape)}")
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"rms_norm_offset_to: weight must have the shape [{x.shape[-1]}], got {list(weight.shape)}")
    check_tensors("rms_norm_offset_to", x=x, weight=weight)


def find(graded, x, weight, eps, offset, cast, dtype):
    if not x.numel():
        return None
    columns = x.shape[-1]
    sizes = (x.numel() // columns, columns, x.dtype, weight.dtype, cast, dtype)
    forward_plan = plan_for(FORWARD, x.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = sum_plan = None
    if graded:
        sizes = (x.numel() // columns, columns, x.dtype, weight.dtype, cast)
        backward_plan = plan_for(BACKWARD, x.device, *sizes)
        if backward_plan is None:
            return None
        sum_plan = plan_for(SUM, x.device, backward_plan.blocks, columns, weight.dtype)
        if sum_plan is None:
            return None
    device = x.device
    index = x.get_device()
    flat = x.dim() == 2
    see = Rows if x.is_cuda else viewed
    rows = x.numel() // columns
    y_dtype = other(dtype, x.dtype)
    dy_dtype = x.dtype
    return (forward_plan, backward_plan, sum_plan, device, index, flat, see, rows, columns, y_dtype, dy_dtype)


def plans_of(graded, x, weight, eps, offset, cast, dtype):
    key = (
        x.shape, x.dtype, x.get_device(), weight.shape, weight.dtype, weight.get_device(), cast, dtype, graded
    )
    try:
        return known[key]
    except KeyError:
        check(x, weight, eps, offset, cast, dtype)
        if not x.is_cuda:
            return find(graded, x, weight, eps, offset, cast, dtype)
        return keep(known, key, find(graded, x, weight, eps, offset, cast, dtype))


def launch(plans, x, weight, eps, offset, cast, dtype):
    forward_plan, _, _, _, index, flat, see, rows, columns, y_dtype, _ = plans
    x_whole = x.is_contiguous()
    y = empty_like(x) if x_whole and y_dtype is None else fresh(x, y_dtype)
    if flat:
        forward_plan.launch(
            index,
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            y,
            float(eps),
            float(offset),
        )
    else:
        forward_plan.launch(
            index,
            see(x, (rows, columns)) if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            see(y, (rows, columns)),
            float(eps),
            float(offset),
        )
    return y


def launch_backward(plans, needs, dy, x, weight, eps, offset, cast, dtype):
    _, backward_plan, sum_plan, device, index, flat, see, rows, columns, _, dy_dtype = plans
    dy = dy.to(dy_dtype)
    dy_whole = dy.is_contiguous()
    x_whole = x.is_contiguous()
    dx = empty_like(dy) if dy_whole else fresh(dy)
    partial = empty(backward_plan.blocks, columns, dtype=float32, device=device)
    if flat:
        backward_plan.launch(
            index,
            dy if dy_whole else as_rows(dy),
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            dx,
            partial,
            float(eps),
            float(offset),
        )
    else:
        backward_plan.launch(
            index,
            see(dy, (rows, columns)) if dy_whole else as_rows(dy),
            see(x, (rows, columns)) if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            see(dx, (rows, columns)),
            partial,
            float(eps),
            float(offset),
        )
    if not needs[1]:
        return dx, None
    dweight = empty_like(weight)
    sum_plan.launch(index, partial, dweight)
    return dx, dweight


def fallback(x, weight, eps, offset, cast, dtype):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, weight, eps, offset, cast, dtype)


def fallback_backward(dy, x, weight, eps, offset, cast, dtype):
    dx, dweight = by_autograd(formula, (x, weight, eps, offset, cast, dtype), (0, 1), (dy,))
    return dx, dweight


class RmsNormOffsetTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, cast, dtype, plans):
        y = launch(plans, x, weight, eps, offset, cast, dtype)
        ctx.save_for_backward(x, weight)
        ctx.plans = plans
        ctx.scalars = (eps, offset, cast, dtype)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        try:
            dx, dweight = launch_backward(ctx.plans, ctx.needs_input_grad, dy, x, weight, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight = fallback_backward(dy, x, weight, *ctx.scalars)
        return dx, dweight, None, None, None, None, None


def rms_norm_offset_to(x, weight, eps, offset, cast, dtype):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, weight, eps, offset, cast, dtype)
        if not is_compiling() and transforms():
            return fallback(x, weight, eps, offset, cast, dtype)
        return registered(x, weight, eps, offset, cast, dtype)
    graded = is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plans = plans_of(graded, x, weight, eps, offset, cast, dtype)
    if plans is None:
        return fallback(x, weight, eps, offset, cast, dtype)
    try:
        if graded:
            return apply(x, weight, eps, offset, cast, dtype, plans)
        return launch(plans, x, weight, eps, offset, cast, dtype)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, weight, eps, offset, cast, dtype)


def fake(x, weight, eps, offset, cast, dtype):
    y = x.new_empty(x.shape, dtype=dtype)
    return y


def fake_backward(dy, x, weight, eps, offset, cast, dtype):
    dx = x.new_empty(x.shape)
    dweight = weight.new_empty(weight.shape)
    return dx, dweight


def run(x, weight, eps, offset, cast, dtype):
    plans = plans_of(False, x, weight, eps, offset, cast, dtype)
    if plans is not None:
        try:
            return launch(plans, x, weight, eps, offset, cast, dtype)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, weight, eps, offset, cast, dtype)
    return y.contiguous()


def run_backward(dy, x, weight, eps, offset, cast, dtype):
    plans = plans_of(True, x, weight, eps, offset, cast, dtype)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight = fallback_backward(dy, x, weight, eps, offset, cast, dtype)
    else:
        try:
            dx, dweight = launch_backward(
                plans, (True, True, True, True, True, True), dy, x, weight, eps, offset, cast, dtype
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight = fallback_backward(dy, x, weight, eps, offset, cast, dtype)
    return dx, dweight


def save(ctx, inputs, output):
    x, weight, eps, offset, cast, dtype = inputs
    ctx.save_for_backward(x, weight)
    ctx.scalars = (eps, offset, cast, dtype)


def derive(ctx, dy):
    x, weight = ctx.saved_tensors
    dx, dweight = registered_backward(dy, x, weight, *ctx.scalars)
    return dx, dweight, None, None, None, None
