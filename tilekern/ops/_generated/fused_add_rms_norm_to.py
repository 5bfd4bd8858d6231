"""fused_add_rms_norm_to, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(residual, x, weight, eps):
    if residual.dim() < 1:
        raise ValueError(f"fused_add_rms_norm_to: residual must have the shape [..., columns], got {list(residual.shape)}")
    if x.shape != residual.shape:
        raise ValueError(f"fused_add_rms_norm_to: residual and x must have one shape, got {list(residual.shape)} and {list(x.shape)}")
    if weight.dim() != 1 or weight.shape[0] != residual.shape[-1]:
        raise ValueError(f"fused_add_rms_norm_to: weight must have the shape [{residual.shape[-1]}], got {list(weight.shape)}")
    check_tensors("fused_add_rms_norm_to", residual=residual, x=x, weight=weight)


def find(graded, residual, x, weight, eps):
    if not residual.numel():
        return None
    columns = residual.shape[-1]
    sizes = (residual.numel() // columns, columns, residual.dtype, weight.dtype, x.dtype)
    forward_plan = plan_for(FORWARD, residual.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = sum_plan = None
    if graded:
        sizes = (residual.numel() // columns, columns, residual.dtype, weight.dtype)
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
    dy_dtype = promoted(residual.dtype, weight.dtype)
    return (forward_plan, backward_plan, sum_plan, device, index, flat, see, rows, columns, dy_dtype)


def plans_of(graded, residual, x, weight, eps):
    key = (
        residual.shape, residual.dtype, residual.get_device(), x.shape, x.dtype, x.get_device(), weight.shape,
        weight.dtype, weight.get_device(), graded
    )
    try:
        return known[key]
    except KeyError:
        check(residual, x, weight, eps)
        if not residual.is_cuda:
            return find(graded, residual, x, weight, eps)
        return keep(known, key, find(graded, residual, x, weight, eps))


def launch(plans, residual, x, weight, eps):
    forward_plan, _, _, _, index, flat, see, rows, columns, _ = plans
    residual_whole = residual.is_contiguous()
    x_whole = x.is_contiguous()
    total = empty_like(residual) if residual_whole else fresh(residual)
    y = empty_like(x) if x_whole else fresh(x)
    if flat:
        forward_plan.launch(
            index,
            residual if residual_whole else as_rows(residual),
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            float(eps),
            total,
            y,
        )
    else:
        forward_plan.launch(
            index,
            see(residual, (rows, columns)) if residual_whole else as_rows(residual),
            see(x, (rows, columns)) if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            float(eps),
            see(total, (rows, columns)),
            see(y, (rows, columns)),
        )
    return total, y


def launch_backward(plans, needs, dtotal, dy, total, weight, eps):
    _, backward_plan, sum_plan, device, index, flat, see, rows, columns, dy_dtype = plans
    dy = dy.to(dy_dtype)
    dtotal_whole = dtotal.is_contiguous()
    dy_whole = dy.is_contiguous()
    total_whole = total.is_contiguous()
    dx = empty_like(dtotal) if dtotal_whole else fresh(dtotal)
    partial = empty(backward_plan.blocks, columns, dtype=float32, device=device)
    if flat:
        backward_plan.launch(
            index,
            dtotal if dtotal_whole else as_rows(dtotal),
            dy if dy_whole else as_rows(dy),
            total if total_whole else as_rows(total),
            weight if weight.is_contiguous() else weight.contiguous(),
            float(eps),
            dx,
            partial,
        )
    else:
        backward_plan.launch(
            index,
            see(dtotal, (rows, columns)) if dtotal_whole else as_rows(dtotal),
            see(dy, (rows, columns)) if dy_whole else as_rows(dy),
            see(total, (rows, columns)) if total_whole else as_rows(total),
            weight if weight.is_contiguous() else weight.contiguous(),
            float(eps),
            see(dx, (rows, columns)),
            partial,
        )
    if not needs[2]:
        return dx, None
    dweight = empty_like(weight)
    sum_plan.launch(index, partial, dweight)
    return dx, dweight


def fallback(residual, x, weight, eps):
    count_fallback(FORWARD)
    with uncast(residual.device.type):
        return formula(residual, x, weight, eps)


class FusedAddRmsNormTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, weight, eps, plans):
        total, y = launch(plans, residual, x, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.plans = plans
        ctx.scalars = (eps,)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @differentiable_once
    def backward(ctx, dtotal, dy):
        total, weight = ctx.saved_tensors
        if dtotal is None or dy is None:
            dx, dweight = absent(ctx.needs_input_grad, dtotal, dy, total, weight, *ctx.scalars)
        else:
            try:
                dx, dweight = launch_backward(
                    ctx.plans, ctx.needs_input_grad, dtotal, dy, total, weight, *ctx.scalars
                )
            except NoVariant as error:
                refused(BACKWARD, error)
                count_fallback(BACKWARD)
                dx, dweight = fallback_backward(dtotal, dy, total, weight, *ctx.scalars)
        return dx, dx, dweight, None, None


def fused_add_rms_norm_to(residual, x, weight, eps):
    if is_compiling() or transforms() or (modes() and not residual.is_meta):
        check(residual, x, weight, eps)
        if not is_compiling() and transforms():
            return fallback(residual, x, weight, eps)
        return registered(residual, x, weight, eps)
    graded = is_grad_enabled() and (residual.requires_grad or x.requires_grad or weight.requires_grad)
    plans = plans_of(graded, residual, x, weight, eps)
    if plans is None:
        return fallback(residual, x, weight, eps)
    try:
        if graded:
            return apply(residual, x, weight, eps, plans)
        return launch(plans, residual, x, weight, eps)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(residual, x, weight, eps)


def fake(residual, x, weight, eps):
    total = residual.new_empty(residual.shape, dtype=residual.dtype)
    y = x.new_empty(x.shape, dtype=x.dtype)
    return total, y


def fake_backward(dtotal, dy, total, weight, eps):
    dx = total.new_empty(total.shape)
    dweight = weight.new_empty(weight.shape)
    return dx, dweight


def run(residual, x, weight, eps):
    plans = plans_of(False, residual, x, weight, eps)
    if plans is not None:
        try:
            return launch(plans, residual, x, weight, eps)
        except NoVariant as error:
            refused(FORWARD, error)
    total, y = fallback(residual, x, weight, eps)
    return total.contiguous(), y.contiguous()


def run_backward(dtotal, dy, total, weight, eps):
    plans = plans_of(True, total, dy, weight, eps)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight = fallback_backward(dtotal, dy, total, weight, eps)
    else:
        try:
            dx, dweight = launch_backward(plans, (True, True, True, True), dtotal, dy, total, weight, eps)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight = fallback_backward(dtotal, dy, total, weight, eps)
    return dx, dweight


def save(ctx, inputs, output):
    residual, x, weight, eps = inputs
    total, y = output
    ctx.save_for_backward(total, weight)
    ctx.scalars = (eps,)


def derive(ctx, dtotal, dy):
    total, weight = ctx.saved_tensors
    dx, dweight = registered_backward(dtotal, dy, total, weight, *ctx.scalars)
    return dx, dx, dweight, None
