"""swiglu_scaled, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(gate, up, gate_multiplier, down_multiplier):
    if gate.dim() < 1:
        raise ValueError(f"swiglu_scaled: gate must have the shape [..., columns], got {list(gate.shape)}")
    if up.shape != gate.shape:
        raise ValueError(f"swiglu_scaled: gate and up must have one shape, got {list(gate.shape)} and {list(up.shape)}")
    check_tensors("swiglu_scaled", gate=gate, up=up)


def find(graded, gate, up, gate_multiplier, down_multiplier):
    if not gate.numel() or up.dtype != gate.dtype:
        return None
    columns = gate.shape[-1]
    sizes = (gate.numel() // columns, columns, gate.dtype)
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


def plans_of(graded, gate, up, gate_multiplier, down_multiplier):
    key = (gate.shape, gate.dtype, gate.get_device(), up.shape, up.dtype, up.get_device(), graded)
    try:
        return known[key]
    except KeyError:
        check(gate, up, gate_multiplier, down_multiplier)
        if not gate.is_cuda:
            return find(graded, gate, up, gate_multiplier, down_multiplier)
        return keep(known, key, find(graded, gate, up, gate_multiplier, down_multiplier))


def launch(plans, gate, up, gate_multiplier, down_multiplier):
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
            float(gate_multiplier),
            float(down_multiplier),
        )
    else:
        forward_plan.launch(
            index,
            see(gate, (rows, columns)) if gate_whole else as_rows(gate),
            see(up, (rows, columns)) if up_whole else as_rows(up),
            see(y, (rows, columns)),
            float(gate_multiplier),
            float(down_multiplier),
        )
    return y


def launch_backward(plans, needs, dy, gate, up, gate_multiplier, down_multiplier):
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
            float(gate_multiplier),
            float(down_multiplier),
        )
    else:
        backward_plan.launch(
            index,
            see(dy, (rows, columns)) if dy_whole else as_rows(dy),
            see(gate, (rows, columns)) if gate_whole else as_rows(gate),
            see(up, (rows, columns)) if up_whole else as_rows(up),
            see(dgate, (rows, columns)),
            see(dup, (rows, columns)),
            float(gate_multiplier),
            float(down_multiplier),
        )
    return dgate, dup


def fallback(gate, up, gate_multiplier, down_multiplier):
    count_fallback(FORWARD)
    with uncast(gate.device.type):
        return formula(gate, up, gate_multiplier, down_multiplier)


def fallback_backward(dy, gate, up, gate_multiplier, down_multiplier):
    dgate, dup = by_autograd(formula, (gate, up, gate_multiplier, down_multiplier), (0, 1), (dy,))
    return dgate, dup


class SwigluScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, gate_multiplier, down_multiplier, plans):
        y = launch(plans, gate, up, gate_multiplier, down_multiplier)
        ctx.save_for_backward(gate, up)
        ctx.plans = plans
        ctx.scalars = (gate_multiplier, down_multiplier)
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
        return dgate, dup, None, None, None


def swiglu_scaled(gate, up, gate_multiplier, down_multiplier):
    if is_compiling() or transforms() or (modes() and not gate.is_meta):
        check(gate, up, gate_multiplier, down_multiplier)
        if not is_compiling() and transforms():
            return fallback(gate, up, gate_multiplier, down_multiplier)
        return registered(gate, up, gate_multiplier, down_multiplier)
    graded = is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    plans = plans_of(graded, gate, up, gate_multiplier, down_multiplier)
    if plans is None:
        return fallback(gate, up, gate_multiplier, down_multiplier)
    try:
        if graded:
            return apply(gate, up, gate_multiplier, down_multiplier, plans)
        return launch(plans, gate, up, gate_multiplier, down_multiplier)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(gate, up, gate_multiplier, down_multiplier)


def fake(gate, up, gate_multiplier, down_multiplier):
    y = gate.new_empty(gate.shape, dtype=promoted(gate.dtype, up.dtype))
    return y


def fake_backward(dy, gate, up, gate_multiplier, down_multiplier):
    dgate = gate.new_empty(gate.shape)
    dup = up.new_empty(up.shape)
    return dgate, dup


def run(gate, up, gate_multiplier, down_multiplier):
    plans = plans_of(False, gate, up, gate_multiplier, down_multiplier)
    if plans is not None:
        try:
            return launch(plans, gate, up, gate_multiplier, down_multiplier)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(gate, up, gate_multiplier, down_multiplier)
    return y.contiguous()


def run_backward(dy, gate, up, gate_multiplier, down_multiplier):
    plans = plans_of(True, gate, up, gate_multiplier, down_multiplier)
    if plans is None:
        count_fallback(BACKWARD)
        dgate, dup = fallback_backward(dy, gate, up, gate_multiplier, down_multiplier)
    else:
        try:
            dgate, dup = launch_backward(
                plans, (True, True, True, True), dy, gate, up, gate_multiplier, down_multiplier
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dgate, dup = fallback_backward(dy, gate, up, gate_multiplier, down_multiplier)
    return dgate, dup


def save(ctx, inputs, output):
    gate, up, gate_multiplier, down_multiplier = inputs
    ctx.save_for_backward(gate, up)
    ctx.scalars = (gate_multiplier, down_multiplier)


def derive(ctx, dy):
    gate, up = ctx.saved_tensors
    dgate, dup = registered_backward(dy, gate, up, *ctx.scalars)
    return dgate, dup, None, None
