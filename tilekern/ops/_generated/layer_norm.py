"""layer_norm, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(x, weight, bias, eps):
    if x.dim() < 1:
        raise ValueError(f"layer_norm: x must have the shape [..., columns], got {list(x.shape)}")
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"layer_norm: weight must have the shape [{x.shape[-1]}], got {list(weight.shape)}")
    if bias.dim() != 1 or bias.shape[0] != x.shape[-1]:
        raise ValueError(f"layer_norm: bias must have the shape [{x.shape[-1]}], got {list(bias.shape)}")
    check_tensors("layer_norm", x=x, weight=weight, bias=bias)


def find(graded, x, weight, bias, eps):
    if not x.numel() or bias.dtype != weight.dtype:
        return None
    columns = x.shape[-1]
    sizes = (x.numel() // columns, columns, x.dtype, weight.dtype)
    forward_plan = plan_for(FORWARD, x.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = sum_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, x.device, *sizes)
        if backward_plan is None:
            return None
        sum_plan = plan_for(SUM, x.device, backward_plan.blocks, 2 * columns, weight.dtype)
        if sum_plan is None:
            return None
    device = x.device
    index = x.get_device()
    flat = x.dim() == 2
    see = Rows if x.is_cuda else viewed
    rows = x.numel() // columns
    y_dtype = other(promoted(x.dtype, weight.dtype), x.dtype)
    return (forward_plan, backward_plan, sum_plan, device, index, flat, see, rows, columns, y_dtype)


def plans_of(graded, x, weight, bias, eps):
    key = (
        x.shape, x.dtype, x.get_device(), weight.shape, weight.dtype, weight.get_device(), bias.shape, bias.dtype,
        bias.get_device(), graded
    )
    try:
        return known[key]
    except KeyError:
        check(x, weight, bias, eps)
        if not x.is_cuda:
            return find(graded, x, weight, bias, eps)
        return keep(known, key, find(graded, x, weight, bias, eps))


def launch(plans, x, weight, bias, eps):
    forward_plan, _, _, _, index, flat, see, rows, columns, y_dtype = plans
    x_whole = x.is_contiguous()
    y = empty_like(x) if x_whole and y_dtype is None else fresh(x, y_dtype)
    if flat:
        forward_plan.launch(
            index,
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            bias if bias.is_contiguous() else bias.contiguous(),
            y,
            float(eps),
        )
    else:
        forward_plan.launch(
            index,
            see(x, (rows, columns)) if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            bias if bias.is_contiguous() else bias.contiguous(),
            see(y, (rows, columns)),
            float(eps),
        )
    return y


def launch_backward(plans, needs, dy, x, weight, bias, eps):
    _, backward_plan, sum_plan, device, index, flat, see, rows, columns, _ = plans
    dy_whole = dy.is_contiguous()
    x_whole = x.is_contiguous()
    dx = empty_like(x) if x_whole else fresh(x)
    partial = empty(backward_plan.blocks, 2 * columns, dtype=float32, device=device)
    if flat:
        backward_plan.launch(
            index,
            dy if dy_whole else as_rows(dy),
            x if x_whole else as_rows(x),
            weight if weight.is_contiguous() else weight.contiguous(),
            dx,
            partial,
            float(eps),
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
        )
    if not needs[1] and not needs[2]:
        return dx, None, None
    summed = empty(2 * columns, dtype=weight.dtype, device=device)
    sum_plan.launch(index, partial, summed)
    dweight, dbias = summed.chunk(2)
    return dx, dweight, dbias


def fallback(x, weight, bias, eps):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, weight, bias, eps)


def fallback_backward(dy, x, weight, bias, eps):
    dx, dweight, dbias = by_autograd(formula, (x, weight, bias, eps), (0, 1, 2), (dy,))
    return dx, dweight, dbias


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, plans):
        y = launch(plans, x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias)
        ctx.plans = plans
        ctx.scalars = (eps,)
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


def layer_norm(x, weight, bias, eps):
    if weight is None or bias is None or (x.__class__ is not Tensor and is_dtensor(x, weight, bias)):
        if is_dtensor(x, weight, bias):
            return by_shards(layer_norm, (x,), (weight, bias), eps, gathered=1)
        return otherwise(x, weight, bias, eps)
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, weight, bias, eps)
        if not is_compiling() and transforms():
            return fallback(x, weight, bias, eps)
        return registered(x, weight, bias, eps)
    graded = is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
    plans = plans_of(graded, x, weight, bias, eps)
    if plans is None:
        return fallback(x, weight, bias, eps)
    try:
        if graded:
            return apply(x, weight, bias, eps, plans)
        return launch(plans, x, weight, bias, eps)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, weight, bias, eps)


def fake(x, weight, bias, eps):
    y = x.new_empty(x.shape, dtype=promoted(x.dtype, weight.dtype, bias.dtype))
    return y


def fake_backward(dy, x, weight, bias, eps):
    dx = x.new_empty(x.shape)
    dweight = weight.new_empty(weight.shape)
    dbias = bias.new_empty(bias.shape)
    return dx, dweight, dbias


def run(x, weight, bias, eps):
    plans = plans_of(False, x, weight, bias, eps)
    if plans is not None:
        try:
            return launch(plans, x, weight, bias, eps)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, weight, bias, eps)
    return y.contiguous()


def run_backward(dy, x, weight, bias, eps):
    plans = plans_of(True, x, weight, bias, eps)
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweight, dbias = fallback_backward(dy, x, weight, bias, eps)
    else:
        try:
            dx, dweight, dbias = launch_backward(plans, (True, True, True, True), dy, x, weight, bias, eps)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweight, dbias = fallback_backward(dy, x, weight, bias, eps)
    return dx, dweight.clone(), dbias.clone()


def save(ctx, inputs, output):
    x, weight, bias, eps = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.scalars = (eps,)


def derive(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = registered_backward(dy, x, weight, bias, *ctx.scalars)
    return dx, dweight, dbias, None
