"""rms_norm_add_rms_norm, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(residual, x, weight, next_weight, eps, offset, cast):
    if residual.dim() < 1:
        raise ValueError(f"rms_norm_add_rms_norm: residual must have the shape [..., columns], got {list(residual.shape)}")
    if x.shape != residual.shape:
        raise ValueError(f"rms_norm_add_rms_norm: residual and x must have one shape, got {list(residual.shape)} and {list(x.shape)}")
    if weight.dim() != 1 or weight.shape[0] != residual.shape[-1]:
        raise ValueError(f"rms_norm_add_rms_norm: weight must have the shape [{residual.shape[-1]}], got {list(weight.shape)}")
    if next_weight.dim() != 1 or next_weight.shape[0] != residual.shape[-1]:
        raise ValueError(f"rms_norm_add_rms_norm: next_weight must have the shape [{residual.shape[-1]}], got {list(next_weight.shape)}")
    check_tensors("rms_norm_add_rms_norm", residual=residual, x=x, weight=weight, next_weight=next_weight)


def find(graded, residual, x, weight, next_weight, eps, offset, cast):
    if not residual.numel() or x.dtype != residual.dtype or next_weight.dtype != weight.dtype:
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
        sum_plan = plan_for(SUM, residual.device, backward_plan.blocks, 2 * columns, weight.dtype)
        if sum_plan is None:
            return None
    device = residual.device
    index = residual.get_device()
    flat = residual.dim() == 2
    see = Rows if residual.is_cuda else viewed
    rows = residual.numel() // columns
    return (forward_plan, backward_plan, sum_plan, device, index, flat, see, rows, columns)


def plans_of(graded, residual, x, weight, next_weight, eps, offset, cast):
    key = (
        residual.shape, residual.dtype, residual.get_device(), x.shape, x.dtype, x.get_device(), weight.shape,
        weight.dtype, weight.get_device(), next_weight.shape, next_weight.dtype, next_weight.get_device(), cast,
        graded
    )
    try:
        return known[key]
    except KeyError:
        check(residual, x, weight, next_weight, eps, offset, cast)
        if not residual.is_cuda:
            return find(graded, residual, x, weight, next_weight, eps, offset, cast)
        return keep(known, key, find(graded, residual, x, weight, next_weight, eps, offset, cast))


def launch(plans, residual, x, weight, next_weight, eps, offset, cast):
    forward_plan, _, _, _, index, flat, see, rows, columns = plans
    residual_whole = residual.is_contiguous()
    x_whole = x.is_contiguous()
    total = empty_like(residual) if residual_whole else fresh(residual)
    y = empty_like(residual) if residual_whole else fresh(residual)
    if flat:
        forward_plan.launch(
            index,
            residual if residual_whole else as_rows(residual),
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            next_weight if next_weight.is_contiguous() else next_weight.contiguous(),
            float(eps),
            float(offset),
            total,
            y,
        )
    else:
        forward_plan.launch(
            index,
            see(residual, (rows, columns)) if residual_whole else as_rows(residual),
            see(x, (rows, columns)) if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            next_weight if next_weight.is_contiguous() else next_weight.contiguous(),
            float(eps),
            float(offset),
            see(total, (rows, columns)),
            see(y, (rows, columns)),
        )
    return total, y


def launch_backward(plans, needs, dtotal, dy, total, x, weight, next_weight, eps, offset, cast):
    _, backward_plan, sum_plan, device, index, flat, see, rows, columns = plans
    dtotal_whole = dtotal.is_contiguous()
    dy_whole = dy.is_contiguous()
    total_whole = total.is_contiguous()
    x_whole = x.is_contiguous()
    dresidual = empty_like(dtotal) if dtotal_whole else fresh(dtotal)
    dx = empty_like(dtotal) if dtotal_whole else fresh(dtotal)
    partial = empty(backward_plan.blocks, 2 * columns, dtype=float32, device=device)
    if flat:
        backward_plan.launch(
            index,
            dtotal if dtotal_whole else as_rows(dtotal),
            dy if dy_whole else as_rows(dy),
            total if total_whole else as_rows(total),
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            next_weight if next_weight.is_contiguous() else next_weight.contiguous(),
            float(eps),
            float(offset),
            dresidual,
            dx,
            partial,
        )
    else:
        backward_plan.launch(
            index,
            see(dtotal, (rows, columns)) if dtotal_whole else as_rows(dtotal),
            see(dy, (rows, columns)) if dy_whole else as_rows(dy),
            see(total, (rows, columns)) if total_whole else as_rows(total),
            see(x, (rows, columns)) if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            next_weight if next_weight.is_contiguous() else next_weight.contiguous(),
            float(eps),
            float(offset),
            see(dresidual, (rows, columns)),
            see(dx, (rows, columns)),
            partial,
        )
    if not needs[2] and not needs[3]:
        return dresidual, dx, None, None
    summed = empty(2 * columns, dtype=weight.dtype, device=device)
    sum_plan.launch(index, partial, summed)
    dweight, dnext_weight = summed.chunk(2)
    return dresidual, dx, dweight, dnext_weight


def fallback(residual, x, weight, next_weight, eps, offset, cast):
    count_fallback(FORWARD)
    with uncast(residual.device.type):
        return formula(residual, x, weight, next_weight, eps, offset, cast)


class RmsNormAddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, weight, next_weight, eps, offset, cast, plans):
        total, y = launch(plans, residual, x, weight, next_weight, eps, offset, cast)
        ctx.save_for_backward(total, x, weight, next_weight)
        ctx.plans = plans
        ctx.scalars = (eps, offset, cast)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @differentiable_once
    def backward(ctx, dtotal, dy):
        total, x, weight, next_weight = ctx.saved_tensors
        if dtotal is None or dy is None:
            dresidual, dx, dweight, dnext_weight = absent(
                ctx.needs_input_grad, dtotal, dy, total, x, weight, next_weight, *ctx.scalars
            )
        else:
            try:
                dresidual, dx, dweight, dnext_weight = launch_backward(
                    ctx.plans, ctx.needs_input_grad, dtotal, dy, total, x, weight, next_weight, *ctx.scalars
                )
            except NoVariant as error:
                refused(BACKWARD, error)
                count_fallback(BACKWARD)
                dresidual, dx, dweight, dnext_weight = fallback_backward(
                    dtotal, dy, total, x, weight, next_weight, *ctx.scalars
                )
        return dresidual, dx, dweight, dnext_weight, None, None, None, None


def rms_norm_add_rms_norm(residual, x, weight, next_weight, eps, offset, cast):
    if is_compiling() or transforms() or (modes() and not residual.is_meta):
        check(residual, x, weight, next_weight, eps, offset, cast)
        if not is_compiling() and transforms():
            return fallback(residual, x, weight, next_weight, eps, offset, cast)
        return registered(residual, x, weight, next_weight, eps, offset, cast)
    graded = is_grad_enabled() and (
        residual.requires_grad or x.requires_grad or weight.requires_grad or next_weight.requires_grad
    )
    plans = plans_of(graded, residual, x, weight, next_weight, eps, offset, cast)
    if plans is None:
        return fallback(residual, x, weight, next_weight, eps, offset, cast)
    try:
        if graded:
            return apply(residual, x, weight, next_weight, eps, offset, cast, plans)
        return launch(plans, residual, x, weight, next_weight, eps, offset, cast)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(residual, x, weight, next_weight, eps, offset, cast)


def fake(residual, x, weight, next_weight, eps, offset, cast):
    total = residual.new_empty(residual.shape, dtype=promoted(residual.dtype, x.dtype))
    y = residual.new_empty(residual.shape, dtype=promoted(residual.dtype, x.dtype))
    return total, y


def fake_backward(dtotal, dy, total, x, weight, next_weight, eps, offset, cast):
    dresidual = total.new_empty(total.shape)
    dx = x.new_empty(x.shape)
    dweight = weight.new_empty(weight.shape)
    dnext_weight = next_weight.new_empty(next_weight.shape)
    return dresidual, dx, dweight, dnext_weight


def run(residual, x, weight, next_weight, eps, offset, cast):
    plans = plans_of(False, residual, x, weight, next_weight, eps, offset, cast)
    if plans is not None:
        try:
            return launch(plans, residual, x, weight, next_weight, eps, offset, cast)
        except NoVariant as error:
            refused(FORWARD, error)
    total, y = fallback(residual, x, weight, next_weight, eps, offset, cast)
    return total.contiguous(), y.contiguous()


def run_backward(dtotal, dy, total, x, weight, next_weight, eps, offset, cast):
    plans = plans_of(True, total, x, weight, next_weight, eps, offset, cast)
    if plans is None:
        count_fallback(BACKWARD)
        dresidual, dx, dweight, dnext_weight = fallback_backward(
            dtotal, dy, total, x, weight, next_weight, eps, offset, cast
        )
    else:
        try:
            dresidual, dx, dweight, dnext_weight = launch_backward(
                plans, (True, True, True, True, True, True, True), dtotal, dy, total, x, weight, next_weight, eps,
                offset, cast
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dresidual, dx, dweight, dnext_weight = fallback_backward(
                dtotal, dy, total, x, weight, next_weight, eps, offset, cast
            )
    return dresidual, dx, dweight.clone(), dnext_weight.clone()


def save(ctx, inputs, output):
    residual, x, weight, next_weight, eps, offset, cast = inputs
    total, y = output
    ctx.save_for_backward(total, x, weight, next_weight)
    ctx.scalars = (eps, offset, cast)


def derive(ctx, dtotal, dy):
    total, x, weight, next_weight = ctx.saved_tensors
    dresidual, dx, dweight, dnext_weight = registered_backward(
        dtotal, dy, total, x, weight, next_weight, *ctx.scalars
    )
    return dresidual, dx, dweight, dnext_weight, None, None, None
