"""gated_linear, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(x, gate_weight, up_weight, activation):
    if x.dim() < 1:
        raise ValueError(f"gated_linear: x must have the shape [..., in_features], got {list(x.shape)}")
    if gate_weight.dim() != 2 or gate_weight.shape[1] != x.shape[-1]:
        raise ValueError(f"gated_linear: gate_weight must have the shape [out_features, {x.shape[-1]}], got {list(gate_weight.shape)}")
    if up_weight.dim() != 2 or up_weight.shape[0] != gate_weight.shape[0] or up_weight.shape[1] != x.shape[-1]:
        raise ValueError(f"gated_linear: up_weight must have the shape [{gate_weight.shape[0]}, {x.shape[-1]}], got {list(up_weight.shape)}")
    check_tensors("gated_linear", x=x, gate_weight=gate_weight, up_weight=up_weight)


def plans_of(graded, x, gate_weight, up_weight, activation):
    key = (
        x.shape, x.dtype, x.get_device(), gate_weight.shape, gate_weight.dtype, gate_weight.get_device(),
        up_weight.shape, up_weight.dtype, up_weight.get_device(), activation, graded
    )
    try:
        return known[key]
    except KeyError:
        check(x, gate_weight, up_weight, activation)
        if not x.is_cuda:
            return find(graded, x, gate_weight, up_weight, activation)
        return keep(known, key, find(graded, x, gate_weight, up_weight, activation))


def launch_backward(plans, needs, dy, x, gate_weight, up_weight, activation):
    return fallback_backward(dy, x, gate_weight, up_weight, activation)


def fallback(x, gate_weight, up_weight, activation):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(x, gate_weight, up_weight, activation)


def fallback_backward(dy, x, gate_weight, up_weight, activation):
    dx, dgate_weight, dup_weight = by_autograd(
        formula, (x, gate_weight, up_weight, activation), (0, 1, 2), (dy,)
    )
    return dx, dgate_weight, dup_weight


class GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_weight, up_weight, activation, plans):
        y = launch(plans, x, gate_weight, up_weight, activation)
        ctx.save_for_backward(x, gate_weight, up_weight)
        ctx.plans = plans
        ctx.scalars = (activation,)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, gate_weight, up_weight = ctx.saved_tensors
        dx, dgate_weight, dup_weight = launch_backward(
            ctx.plans, ctx.needs_input_grad, dy, x, gate_weight, up_weight, *ctx.scalars
        )
        return dx, dgate_weight, dup_weight, None, None


def gated_linear(x, gate_weight, up_weight, activation):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(x, gate_weight, up_weight, activation)
        if not is_compiling() and transforms():
            return fallback(x, gate_weight, up_weight, activation)
        return registered(x, gate_weight, up_weight, activation)
    graded = is_grad_enabled() and (x.requires_grad or gate_weight.requires_grad or up_weight.requires_grad)
    plans = plans_of(graded, x, gate_weight, up_weight, activation)
    if plans is None:
        return fallback(x, gate_weight, up_weight, activation)
    try:
        if graded:
            return apply(x, gate_weight, up_weight, activation, plans)
        return launch(plans, x, gate_weight, up_weight, activation)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(x, gate_weight, up_weight, activation)


def fake(x, gate_weight, up_weight, activation):
    y = x.new_empty(
        (*x.shape[:-1], gate_weight.shape[0]), dtype=promoted(x.dtype, gate_weight.dtype, up_weight.dtype)
    )
    return y


def fake_backward(dy, x, gate_weight, up_weight, activation):
    dx = x.new_empty(x.shape)
    dgate_weight = gate_weight.new_empty(gate_weight.shape)
    dup_weight = up_weight.new_empty(up_weight.shape)
    return dx, dgate_weight, dup_weight


def run(x, gate_weight, up_weight, activation):
    plans = plans_of(False, x, gate_weight, up_weight, activation)
    if plans is not None:
        try:
            return launch(plans, x, gate_weight, up_weight, activation)
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(x, gate_weight, up_weight, activation)
    return y.contiguous()


def run_backward(dy, x, gate_weight, up_weight, activation):
    plans = plans_of(True, x, gate_weight, up_weight, activation)
    if plans is None:
        dx, dgate_weight, dup_weight = fallback_backward(dy, x, gate_weight, up_weight, activation)
    else:
        dx, dgate_weight, dup_weight = launch_backward(
            plans, (True, True, True, True), dy, x, gate_weight, up_weight, activation
        )
    return dx, dgate_weight, dup_weight


def save(ctx, inputs, output):
    x, gate_weight, up_weight, activation = inputs
    ctx.save_for_backward(x, gate_weight, up_weight)
    ctx.scalars = (activation,)


def derive(ctx, dy):
    x, gate_weight, up_weight = ctx.saved_tensors
    dx, dgate_weight, dup_weight = registered_backward(dy, x, gate_weight, up_weight, *ctx.scalars)
    return dx, dgate_weight, dup_weight, None
