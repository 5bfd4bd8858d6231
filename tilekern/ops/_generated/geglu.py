"""geglu, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(gate, up, tanh):
    if gate.dim() < 1:
        raise ValueError(f"geglu: gate must have the shape [..., columns], got {list(gate.shape)}")
    if up.shape != gate.shape:
        raise ValueError(f"geglu: gate and up must have one shape, got {list(gate.shape)} and {list(up.shape)}")
    check_tensors("geglu", gate=gate, up=up)


def find(graded, gate, up, tanh):
    if not gate.numel() or up.dtype != gate.dtype:
        return None
    columns = gate.shape[-1]
    sizes = (gate.numel() // columns, columns, gate.dtype, tanh)
    forward_plan = plan_for(FORWARD, gate.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, gate.device, *sizes)
        if backward_plan is None:
            return None
    index = gate.get_device()
    flat = gate.dim() == 2
    see = Rows if gate.is_cuda else viewed
    rows = gate.numel() // columns
    return (forward_plan, backward_plan, index, flat, see, rows, columns)


def plans_of(graded, gate, up, tanh):
    key = (gate.shape, gate.dtype, gate.get_device(), up.shape, up.dtype, up.get_device(), tanh, graded)
    try:
        return known[key]
    except KeyError:
        check(gate, up, tanh)
        if not gate.is_cuda:
            return find(graded, gate, up, tanh)
        return keep(known, key, find(graded, gate, up, tanh))


def launch(plans, gate, up, tanh):
    forward_plan, _, index, flat, see, rows, columns = plans
    gate_whole = gate.is_contiguous()
    up_whole = up.is_contiguous()
    y = empty_like(gate) if gate_whole else fresh(gate)
    if flat:
        forward_plan.launch(
            index,
            gate if gate_whole else as_rows(gate),
            up if up_whole else as_rows(up),
            y,
        )
    else:
        forward_plan.launch(
            index,
            see(gate, (rows, columns)) if gate_whole else as_rows(gate),
            see(up, (rows, columns)) if up_whole else as_rows(up),
            see(y, (rows, columns)),
        )
    return y


def launch_backward(plans, needs, dy, gate, up, tanh):
    _, backward_plan, index, flat, see, rows, columns = plans
    dy_whole = dy.is_contiguous()
    gate_whole = gate.is_contiguous()
    up_whole = up.is_contiguous()
    dgate = empty_like(dy) if dy_whole else fresh(dy)
    dup = empty_like(dy) if dy_whole else fresh(dy)
    if flat:
        backward_plan.launch(
            index,
            dy if dy_whole else as_rows(dy),
            gate if gate_whole else as_rows(gate),
            up if up_whole else as_rows(up),
            dgate,
            dup,
        )
    else:
        backward_plan.launch(
            index,
            see(dy, (rows, columns)) if dy_whole else as_rows(dy),
            see(gate, (rows, columns)) if gate_whole else as_rows(gate),
            see(up, (rows, columns)) if up_whole else as_rows(up),
            see(dgate, (rows, columns)),
            see(dup, (rows, columns)),
        )
    return dgate, dup


def fallback(gate, up, tanh):
    count_fallback(FORWARD)
    with uncast(gate.device.type):
        return formula(gate, up, tanh)


def fallback_backward(dy, gate, up, tanh):
    dgate, dup = by_autograd(formula, (gate, up, tanh), (0, 1), (dy,))
    return dgate, dup


class Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, tanh, plans):
        y = launch(plans, gate, up, tanh)
        ctx.save_for_backward(gate, up)
        ctx.plans = plans
        ctx.scalars = (tanh,)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        try:
            dgate, dup = launch_backward(ctx.plans, ctx.needs_input_grad, dy, gate, up, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dgate, dup = fallback_backward(dy, gate, up, *ctx.scalars)
        return dgate, dup, None, None


def geglu(gate, up, tanh):
    if is_compiling() or transforms() or (modes() and not gate.is_meta):
        check(gate, up, tanh)
        if not is_compiling() and transforms():
            return fallback(gate, up, tanh)
        return registered(gate, up, tanh)
    graded = is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    plans = plans_of(graded, gate, up, tanh)
    if plans is None:
        return fallback(gate, up, tanh)
    try:
        if graded:
            return apply(gate, up, tanh, plans)
        return launch(plans, gate, up, tanh)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(gate, up, tanh)


def fake(gate, up, tanh):
    y = gate.new_empty(gate.shape, dtype=promoted(gate.dtype, up.dtype))
    return y


def fake_backward(dy, gate, up, tanh):
    dgate = gate.new_empty(gate.shape)
    dup = up.new_empty(up.shape)
    return dgate, dup


def run(gate, up, tanh):
    plans = plans_of(False, gate, up, tanh)
    if plans is not None:
        try:
            return launch(plans, gate, up, tanh)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(gate, up, tanh)
    return y.contiguous()


def run_backward(dy, gate, up, tanh):
    plans = plans_of(True, gate, up, tanh)
    if plans is None:
        count_fallback(BACKWARD)
        dgate, dup = fallback_backward(dy, gate, up, tanh)
    else:
        try:
            dgate, dup = launch_backward(plans, (True, True, True), dy, gate, up, tanh)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dgate, dup = fallback_backward(dy, gate, up, tanh)
    return dgate, dup


def save(ctx, inputs, output):
    gate, up, tanh = inputs
    ctx.save_for_backward(gate, up)
    ctx.scalars = (tanh,)


def derive(ctx, dy):
    gate, up = ctx.saved_tensors
    dgate, dup = registered_backward(dy, gate, up, *ctx.scalars)
    return dgate, dup, None
