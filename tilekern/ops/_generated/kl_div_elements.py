"""kl_div_elements, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(input, target, log_target):
    if input.dim() < 1:
        raise ValueError(f"kl_div_elements: input must have the shape [..., columns], got {list(input.shape)}")
    if target.shape != input.shape:
        raise ValueError(f"kl_div_elements: input and target must have one shape, got {list(input.shape)} and {list(target.shape)}")
    check_tensors("kl_div_elements", input=input, target=target)


def find(graded, input, target, log_target):
    if not input.numel() or target.dtype != input.dtype:
        return None
    columns = input.shape[-1]
    sizes = (input.numel() // columns, columns, input.dtype, log_target)
    forward_plan = plan_for(FORWARD, input.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, input.device, *sizes)
        if backward_plan is None:
            return None
    index = input.get_device()
    flat = input.dim() == 2
    see = Rows if input.is_cuda else viewed
    rows = input.numel() // columns
    return (forward_plan, backward_plan, index, flat, see, rows, columns)


def plans_of(graded, input, target, log_target):
    key = (
        input.shape, input.dtype, input.get_device(), target.shape, target.dtype, target.get_device(), log_target,
        graded
    )
    try:
        return known[key]
    except KeyError:
        check(input, target, log_target)
        if not input.is_cuda:
            return find(graded, input, target, log_target)
        return keep(known, key, find(graded, input, target, log_target))


def launch(plans, input, target, log_target):
    forward_plan, _, index, flat, see, rows, columns = plans
    input_whole = input.is_contiguous()
    target_whole = target.is_contiguous()
    loss = empty_like(input) if input_whole else fresh(input)
    if flat:
        forward_plan.launch(
            index,
            input if input_whole else as_rows(input),
            target if target_whole else as_rows(target),
            loss,
        )
    else:
        forward_plan.launch(
            index,
            see(input, (rows, columns)) if input_whole else as_rows(input),
            see(target, (rows, columns)) if target_whole else as_rows(target),
            see(loss, (rows, columns)),
        )
    return loss


def launch_backward(plans, needs, dloss, target, log_target):
    _, backward_plan, index, flat, see, rows, columns = plans
    dloss_whole = dloss.is_contiguous()
    target_whole = target.is_contiguous()
    dinput = empty_like(dloss) if dloss_whole else fresh(dloss)
    if flat:
        backward_plan.launch(
            index,
            dloss if dloss_whole else as_rows(dloss),
            target if target_whole else as_rows(target),
            dinput,
        )
    else:
        backward_plan.launch(
            index,
            see(dloss, (rows, columns)) if dloss_whole else as_rows(dloss),
            see(target, (rows, columns)) if target_whole else as_rows(target),
            see(dinput, (rows, columns)),
        )
    return dinput


def fallback(input, target, log_target):
    count_fallback(FORWARD)
    with uncast(input.device.type):
        return formula(input, target, log_target)


class KlDivElements(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, target, log_target, plans):
        loss = launch(plans, input, target, log_target)
        ctx.save_for_backward(target)
        ctx.plans = plans
        ctx.scalars = (log_target,)
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx, dloss):
        (target,) = ctx.saved_tensors
        try:
            dinput = launch_backward(ctx.plans, ctx.needs_input_grad, dloss, target, *ctx.scalars)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dinput = fallback_backward(dloss, target, *ctx.scalars)
        return dinput, None, None, None


def kl_div_elements(input, target, log_target):
    if is_compiling() or transforms() or (modes() and not input.is_meta):
        check(input, target, log_target)
        if not is_compiling() and transforms():
            return fallback(input, target, log_target)
        return registered(input, target, log_target)
    graded = is_grad_enabled() and input.requires_grad
    plans = plans_of(graded, input, target, log_target)
    if plans is None or (target.requires_grad and is_grad_enabled()):
        return fallback(input, target, log_target)
    try:
        if graded:
            return apply(input, target, log_target, plans)
        return launch(plans, input, target, log_target)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(input, target, log_target)


def fake(input, target, log_target):
    loss = input.new_empty(input.shape, dtype=promoted(input.dtype, target.dtype))
    return loss


def fake_backward(dloss, target, log_target):
    dinput = target.new_empty(target.shape)
    return dinput


def run(input, target, log_target):
    plans = plans_of(False, input, target, log_target)
    if plans is not None:
        try:
            return launch(plans, input, target, log_target)
        except NoVariant as error:
            refused(FORWARD, error)
    loss = fallback(input, target, log_target)
    return loss.contiguous()


def run_backward(dloss, target, log_target):
    plans = plans_of(True, target, target, log_target)
    if plans is None:
        count_fallback(BACKWARD)
        dinput = fallback_backward(dloss, target, log_target)
    else:
        try:
            dinput = launch_backward(plans, (True, True, True), dloss, target, log_target)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dinput = fallback_backward(dloss, target, log_target)
    return dinput


def save(ctx, inputs, output):
    input, target, log_target = inputs
    ctx.save_for_backward(target)
    ctx.scalars = (log_target,)


def derive(ctx, dloss):
    (target,) = ctx.saved_tensors
    dinput = registered_backward(dloss, target, *ctx.scalars)
    return dinput, None, None
