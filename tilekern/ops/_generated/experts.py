"""experts, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(
    graded, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
    up_turned, down_turned
):
    key = (
        x.shape, x.dtype, x.get_device(), weights.shape, weights.dtype, weights.get_device(), gate_up.shape,
        gate_up.dtype, gate_up.get_device(), down.shape, down.dtype, down.get_device(), None if gate_up_bias is None
        else (gate_up_bias.shape, gate_up_bias.dtype, gate_up_bias.get_device()), None if down_bias is None else
        (down_bias.shape, down_bias.dtype, down_bias.get_device()), ids.shape, ids.dtype, ids.get_device(),
        activation == 'gelu_tanh', interleaved, up_turned, down_turned, graded
    )
    try:
        return known[key]
    except KeyError:
        check(
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
            up_turned, down_turned
        )
        if not x.is_cuda:
            return find(
                graded, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
                interleaved, up_turned, down_turned
            )
        return keep(
            known, key, find(graded, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha,
            limit, shift, interleaved, up_turned, down_turned)
        )


def fallback(
    x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
    up_turned, down_turned
):
    count_fallback(FORWARD)
    with uncast(x.device.type):
        return formula(
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
            up_turned, down_turned
        )


def fallback_backward(
    dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen, activation,
    alpha, limit, shift, interleaved, up_turned, down_turned
):
    dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = by_autograd(
        formula, (x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
        interleaved, up_turned, down_turned), (0, 1, 2, 3, 4, 5), (dy,)
    )
    return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
        up_turned, down_turned, plans
    ):
        y, pre, offsets, order, ranks, chosen = launch(
            plans, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
            interleaved, up_turned, down_turned
        )
        ctx.save_for_backward(
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen
        )
        ctx.plans = plans
        ctx.scalars = (activation, alpha, limit, shift, interleaved, up_turned, down_turned)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        (
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen
        ) = ctx.saved_tensors
        try:
            dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = launch_backward(
                ctx.plans, ctx.needs_input_grad, dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre,
                offsets, order, ranks, chosen, *ctx.scalars
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = fallback_backward(
                dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen,
                *ctx.scalars
            )
        return (
            dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias, None, None, None, None, None, None, None, None,
            None
        )


def experts(
    x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
    up_turned, down_turned
):
    if is_compiling() or transforms() or (modes() and not x.is_meta):
        check(
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
            up_turned, down_turned
        )
        if not is_compiling() and transforms():
            return fallback(
                x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
                interleaved, up_turned, down_turned
            )
        return registered(
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
            up_turned, down_turned
        )[0]
    graded = is_grad_enabled() and (
        x.requires_grad or weights.requires_grad or gate_up.requires_grad or down.requires_grad or (gate_up_bias is
        not None and gate_up_bias.requires_grad) or (down_bias is not None and down_bias.requires_grad)
    )
    graded = graded and (
        x.requires_grad, weights.requires_grad, gate_up.requires_grad, down.requires_grad, (gate_up_bias is not None
        and gate_up_bias.requires_grad), (down_bias is not None and down_bias.requires_grad)
    )
    plans = plans_of(
        graded, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
        interleaved, up_turned, down_turned
    )
    if plans is None:
        return fallback(
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
            up_turned, down_turned
        )
    try:
        if graded:
            return apply(
                x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
                interleaved, up_turned, down_turned, plans
            )
        return launch(
            plans, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
            interleaved, up_turned, down_turned
        )[0]
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(
            x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
            up_turned, down_turned
        )


def fake_backward(
    dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen, activation,
    alpha, limit, shift, interleaved, up_turned, down_turned, needs
):
    dx = x.new_empty(x.shape) if needs[0] else dy.new_empty(0)
    dweights = weights.new_empty(weights.shape) if needs[1] else dy.new_empty(0)
    dgate_up = gate_up.new_empty(gate_up.shape) if needs[2] else dy.new_empty(0)
    ddown = down.new_empty(down.shape) if needs[3] else dy.new_empty(0)
    dgate_up_bias = gate_up_bias.new_empty(gate_up_bias.shape) if needs[4] else dy.new_empty(0)
    ddown_bias = down_bias.new_empty(down_bias.shape) if needs[5] else dy.new_empty(0)
    return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias


def run(
    x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
    up_turned, down_turned
):
    plans = plans_of(
        False, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
        interleaved, up_turned, down_turned
    )
    if plans is not None:
        try:
            return launch(
                plans, x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift,
                interleaved, up_turned, down_turned
            )
        except NoVariant as error:
            refused(FORWARD, error)
    y = fallback(
        x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
        up_turned, down_turned
    )
    return y.contiguous(), *rest(
        x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
        up_turned, down_turned
    )


def run_backward(
    dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen, activation,
    alpha, limit, shift, interleaved, up_turned, down_turned, needs
):
    plans = plans_of(
        (needs[0], needs[1], needs[2], needs[3], needs[4], needs[5]), x, weights, gate_up, down, gate_up_bias,
        down_bias, ids, activation, alpha, limit, shift, interleaved, up_turned, down_turned
    )
    if plans is None:
        count_fallback(BACKWARD)
        dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = fallback_backward(
            dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen,
            activation, alpha, limit, shift, interleaved, up_turned, down_turned
        )
    else:
        try:
            dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = launch_backward(
                plans, needs, dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order,
                ranks, chosen, activation, alpha, limit, shift, interleaved, up_turned, down_turned
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = fallback_backward(
                dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen,
                activation, alpha, limit, shift, interleaved, up_turned, down_turned
            )
    return (
        dx if needs[0] else dy.new_empty(0), dweights if needs[1] else dy.new_empty(0), dgate_up if needs[2] else
        dy.new_empty(0), ddown if needs[3] else dy.new_empty(0), dgate_up_bias if needs[4] else dy.new_empty(0),
        ddown_bias if needs[5] else dy.new_empty(0)
    )


def save(ctx, inputs, output):
    (
        x, weights, gate_up, down, gate_up_bias, down_bias, ids, activation, alpha, limit, shift, interleaved,
        up_turned, down_turned
    ) = inputs
    y, pre, offsets, order, ranks, chosen = output
    ctx.save_for_backward(
        x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen
    )
    ctx.scalars = (activation, alpha, limit, shift, interleaved, up_turned, down_turned)


def derive(ctx, dy, dpre, doffsets, dorder, dranks, dchosen):
    (
        x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen
    ) = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:14])
    dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = registered_backward(
        dy, x, weights, gate_up, down, gate_up_bias, down_bias, ids, pre, offsets, order, ranks, chosen,
        *ctx.scalars, needs
    )
    return (
        dx if needs[0] else None, dweights if needs[1] else None, dgate_up if needs[2] else None, ddown if needs[3]
        else None, dgate_up_bias if needs[4] else None, ddown_bias if needs[5] else None, None, None, None, None,
        None, None, None, None
    )
