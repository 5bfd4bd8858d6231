"""fused_add_layer_norm, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(residual, x, weight, bias, eps):
    if residual.dim() < 1:
        raise ValueError(f"fused_add_layer_norm: residual must have the shape [..., columns], got {list(residual.shape)}")
    if x.shape != residual.shape:
        raise ValueError(f"fused_add_layer_norm: residual and x must have one shape, got {list(residual.shape)} and {list(x.shape)}")
    if weight.dim() != 1 or weight.shape[0] != residual.shape[-1]:
        raise ValueError(f"fused_add_layer_norm: weight must have the shape [{residual.shape[-1]}], got {list(weight.shape)}")
    if bias.dim() != 1 or bias.shape[0] != residual.shape[-1]:
        raise ValueError(f"fused_add_layer_norm: bias must have the shape [{residual.shape[-1]}], got {list(bias.shape)}")
    check_tensors("fused_add_layer_norm", residual=residual, x=x, weight=weight, bias=bias)


def find(graded, residual, x, weight, bias, eps):
    if not residual.numel() or x.dtype != residual.dtype or bias.dtype != weight.dtype:
        return None
    columns = residual.shape[-1]
    sizes = (residual.numel() // columns, columns, residual.dtype, weight.dtype)
    forward_plan = plan_for(FORWARD, residual.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = sum_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, residual.device, *sizes)
        if backward_plan is None:
            return None
        sum_plan = plan_for(SUM, residual.device, backward_plan.blocks, 2 * columns, weight.dtype)
        if sum_plan is None:
            return None
    device = residual.device
    index = residual.get_device()
    flat = residual.dim() == 2
    see = Rows if residual.is_cuda else viewed
    rows = residual.numel() // columns
    y_dtype = other(promoted(residual.dtype, weight.dtype), residual.dtype)
    return (forward_plan, backward_plan, sum_plan, device, index, flat, see, rows, columns, y_dtype)


def plans_of(graded, residual, x, weight, bias, eps):
    key = (
        residual.shape, residual.dtype, residual.get_device(), x.shape, x.dtype, x.get_device(), weight.shape,
        weight.dtype, weight.get_device(), bias.shape, bias.dtype, bias.get_device(), graded
    )
    try:
        return known[key]
    except KeyError:
        check(residual, x, weight, bias, eps)
        if not residual.is_cuda:
            return find(graded, residual, x, weight, bias, eps)
        return keep(known, key, find(graded, residual, x, weight, bias, eps))


def launch(plans, residual, x, weight, bias, eps):
    forward_plan, _, _, _, index, flat, see, rows, columns, y_dtype = plans
    residual_whole = residual.is_contiguous()
    x_whole = x.is_contiguous()
    total = empty_like(residual) if residual_whole else fresh(residual)
    y = empty_like(residual) if residual_whole and y_dtype is None else fresh(residual, y_dtype)
    if flat:
        forward_plan.launch(
            index,
            residual if residual_whole else as_rows(residual),
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            bias if bias.is_contiguous() else bias.contiguous(),
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
            bias if bias.is_contiguous() else bias.contiguous(),
            float(eps),
            see(total, (rows, columns)),
            see(y, (rows, columns)),
        )
    return total, y


def launch_backward(plans, needs, dtotal, dy, total, weight, bias, eps):
    _, backward_plan, sum_plan, device, index, flat, see, rows, columns, _ = plans
    dtotal_whole = dtotal.is_contiguous()
    dy_whole = dy.is_contiguous()
    total_whole = total.is_contiguous()
    dx = empty_like(dtotal) if dtotal_whole else fresh(dtotal)
    partial = empty(backward_plan.blocks, 2 * columns, dtype=float32, device=device)
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
    if not needs[2] and not needs[3]:
        return dx, None, None
    summed = empty(2 * columns, dtype=weight.dtype, device=device)
    sum_plan.launch(index, partial, summed)
    dweight, dbias = summed.chunk(2)
    return dx, dweight, dbias


def fallback(residual, x, weight, bias, eps):
    count_fallback(FORWARD)
    with uncast(residual.device.type):
        return formula(residual, x, weight, bias, eps)


class FusedAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, weight, bias, eps, plans):
        total, y = launch(plans, residual, x, weight, bias, eps)
        ctx.save_for_backward(total, weight, bias)
        ctx.plans = plans
        ctx.scalars = (eps,)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @differentiable_once
    def backward(ctx, dtotal, dy):
        total, weight, bias = ctx.saved_tensors
        if dtotal is None or dy is None:
            dx, dweight, dbias = absent(ctx.needs_input_grad, dtotal, dy, total, weight, bias, *ctx.scalars)
        else:
            try:
                dx, dweight, dbias = launch_backward(
                    ctx.plans, ctx.needs_input_grad, dtotal, dy, total, weight, bias, *ctx.scalars
                )
            except NoVariant as error:
                refused(BACKWARD, error)
                count_fallback(BACKWARD)
                dx, dweight, dbias = fallback_backward(dtotal, dy, total, weight, bias, *ctx.scalars)
        return dx, dx, dweight, dbias, None, None


def fused_add_layer_norm(residual, x, weight, bias, eps):
    if weight is None or bias is None:
        return otherwise(residual, x, weight, bias, eps)
    if is_compiling() or transforms() or (modes() and not residual.is_meta):
        check(residual, x, weight, bias, eps)
        if not is_compiling() and transforms():
            return fallback(residual, x, weight, bias, eps)
        return registered(residual, x, weight, bias, eps)
    graded = is_grad_enabled() and (
        residual.requires_grad or x.requires_grad or weight.requires_grad or bias.requires_grad
    )
    plans = plans_of(graded, residual, x, weight, bias, eps)
    if plans is None:
        return fallback(residual, x, weight, bias, eps)
    try:
        if graded:
            return apply(residual, x, weight, bias, eps, plans)
        return launch(plans, residual, x, weight, bias, eps)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(residual, x, weight, bias, eps)


def fake(residual, x, weight, bias, eps):
    total = residual.new_empty(residual.shape, dtype=promoted(residual.dtype, x.dtype))
    y = residual.new_empty(residual.shape, dtype=promoted(residual.dtype, x.dtype, weight.dtype, bias.dtype))
    return total, y


def fake_backward(dtotal, dy, total, weight, bias, eps):
    dx = total.new_empty(total.shape)
    dweight = weight.new_empty(weight.shape)
    dbias = bias.new_empty(bias.shape)
    return dx, dweight, dbias


def run(residual, x, weight, bias, eps):
    plans = plans_of(False, residual, x, weight, bias, eps)
    if plans is not None:
        try:
            return launch(plans, residual, x, weight, bias, eps)
        except NoVariant as error:
            refused(FORWARD, error)
    total, y = fallback(residual, x, weight, bias, eps)
    return total.contiguous(), y.contiguous()


def run_backward(dtotal, dy, total, weight, bias, eps):
    plans = plans_of(True, total, total, weight, bias, eps)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight, dbias = fallback_backward(dtotal, dy, total, weight, bias, eps)
    else:
        try:
            dx, dweight, dbias = launch_backward(
                plans, (True, True, True, True, True), dtotal, dy, total, weight, bias, eps
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight, dbias = fallback_backward(dtotal, dy, total, weight, bias, eps)
    return dx, dweight.clone(), dbias.clone()


def save(ctx, inputs, output):
    residual, x, weight, bias, eps = inputs
    total, y = output
    ctx.save_for_backward(total, weight, bias)
    ctx.scalars = (eps,)


def derive(ctx, dtotal, dy):
    total, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = registered_backward(dtotal, dy, total, weight, bias, *ctx.scalars)
    return dx, dx, dweight, dbias, None
