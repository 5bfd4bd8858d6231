"""rms_norm_add, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(residual, x, weight, eps, offset, cast):
    if residual.dim() < 1:
        raise ValueError(f"rms_norm_add: residual must have the shape [..., columns], got {list(residual.shape)}")
    if x.shape != residual.shape:
        raise ValueError(f"rms_norm_add: residual and x must have one shape, got {list(residual.shape)} and {list(x.shape)}")
    if weight.dim() != 1 or weight.shape[0] != residual.shape[-1]:
        raise ValueError(f"rms_norm_add: weight must have the shape [{residual.shape[-1]}], got {list(weight.shape)}")
    check_tensors("rms_norm_add", residual=residual, x=x, weight=weight)


def find(graded, residual, x, weight, eps, offset, cast):
    if not residual.numel() or x.dtype != residual.dtype:
        return None
    columns = residual.shape[-1]
    sizes = (residual.numel() // columns, columns, residual.dtype, weight.dtype, cast)
    forward_plan = plan_for(FORWARD, residual.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = sum_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, residual.device, *sizes)
        if backward_plan is None:
            return None
        sum_plan = plan_for(SUM, residual.device, backward_plan.blocks, columns, weight.dtype)
        if sum_plan is None:
            return None
    device = residual.device
    index = residual.get_device()
    flat = residual.dim() == 2
    see = Rows if residual.is_cuda else viewed
    rows = residual.numel() // columns
    return (forward_plan, backward_plan, sum_plan, device, index, flat, see, rows, columns)


def plans_of(graded, residual, x, weight, eps, offset, cast):
    key = (
        residual.shape, residual.dtype, residual.get_device(), x.shape, x.dtype, x.get_device(), weight.shape,
        weight.dtype, weight.get_device(), cast, graded
    )
    try:
        return known[key]
    except KeyError:
        check(residual, x, weight, eps, offset, cast)
        if not residual.is_cuda:
            return find(graded, residual, x, weight, eps, offset, cast)
        return keep(known, key, find(graded, residual, x, weight, eps, offset, cast))


def launch(plans, residual, x, weight, eps, offset, cast):
    forward_plan, _, _, _, index, flat, see, rows, columns = plans
    residual_whole = residual.is_contiguous()
    x_whole = x.is_contiguous()
    y = empty_like(residual) if residual_whole else fresh(residual)
    if flat:
        forward_plan.launch(
            index,
            residual if residual_whole else as_rows(residual),
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            float(eps),
            float(offset),
            y,
        )
    else:
        forward_plan.launch(
            index,
            see(residual, (rows, columns)) if residual_whole else as_rows(residual),
            see(x, (rows, columns)) if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            float(eps),
            float(offset),
            see(y, (rows, columns)),
        )
    return y


def launch_backward(plans, needs, dy, x, weight, eps, offset, cast):
    _, backward_plan, sum_plan, device, index, flat, see, rows, columns = plans
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
    if not needs[2]:
        return dx, None
    dweight = empty_like(weight)
    sum_plan.launch(index, partial, dweight)
    return dx, dweight


def fallback(residual, x, weight, eps, offset, cast):
    count_fallback(FORWARD)
    with uncast(residual.device.type):
        return formula(residual, x, weight, eps, offset, cast)


class RmsNormAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, weight, eps, offset, cast, plans):
        y = launch(plans, residual, x, weight, eps, offset, cast)
        ctx.save_for_backward(x, weight)
        ctx.plans = plans
        ctx.scalars = (eps, offset, cast)
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
        return dy, dx, dweight, None, None, None, None


def rms_norm_add(residual, x, weight, eps, offset, cast):
    if is_compiling() or transforms() or (modes() and not residual.is_meta):
        check(residual, x, weight, eps, offset, cast)
        if not is_compiling() and transforms():
            return fallback(residual, x, weight, eps, offset, cast)
        return registered(residual, x, weight, eps, offset, cast)
    graded = is_grad_enabled() and (residual.requires_grad or x.requires_grad or weight.requires_grad)
    plans = plans_of(graded, residual, x, weight, eps, offset, cast)
    if plans is None:
        return fallback(residual, x, weight, eps, offset, cast)
    try:
        if graded:
            return apply(residual, x, weight, eps, offset, cast, plans)
        return launch(plans, residual, x, weight, eps, offset, cast)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(residual, x, weight, eps, offset, cast)


def fake(residual, x, weight, eps, offset, cast):
    y = residual.new_empty(residual.shape, dtype=promoted(residual.dtype, x.dtype))
    return y


def fake_backward(dy, x, weight, eps, offset, cast):
    dx = x.new_empty(x.shape)
    dweight = weight.new_empty(weight.shape)
    return dx, dweight


def run(residual, x, weight, eps, offset, cast):
    plans = plans_of(False, residual, x, weight, eps, offset, cast)
    if plans is not None:
        try:
            return launch(plans, residual, x, weight, eps, offset, cast)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(residual, x, weight, eps, offset, cast)
    return y.contiguous()


def run_backward(dy, x, weight, eps, offset, cast):
    plans = plans_of(True, x, x, weight, eps, offset, cast)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight = fallback_backward(dy, x, weight, eps, offset, cast)
    else:
        try:
            dx, dweight = launch_backward(
                plans, (True, True, True, True, True, True), dy, x, weight, eps, offset, cast
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight = fallback_backward(dy, x, weight, eps, offset, cast)
    return dx, dweight


def save(ctx, inputs, output):
    residual, x, weight, eps, offset, cast = inputs
    ctx.save_for_backward(x, weight)
    ctx.scalars = (eps, offset, cast)


def derive(ctx, dy):
    x, weight = ctx.saved_tensors
    dx, dweight = registered_backward(dy, x, weight, *ctx.scalars)
    return dy, dx, dweight, None, None, None
