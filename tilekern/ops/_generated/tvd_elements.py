"""tvd_elements, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(p, q, counted):
    if p.dim() < 1:
        raise ValueError(f"tvd_elements: p must have the shape [..., columns], got {list(p.shape)}")
    if q.shape != p.shape:
        raise ValueError(f"tvd_elements: p and q must have one shape, got {list(p.shape)} and {list(q.shape)}")
    if counted.shape != p.shape[:-1]:
        raise ValueError(f"tvd_elements: counted must have the shape {list(p.shape[:-1])}, got {list(counted.shape)}")
    check_tensors("tvd_elements", p=p, q=q, counted=counted)


def find(graded, p, q, counted):
    if not p.numel() or q.dtype != p.dtype or counted.dtype != torch.float32:
        return None
    columns = p.shape[-1]
    sizes = (p.numel() // columns, columns, p.dtype)
    forward_plan = plan_for(FORWARD, p.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    if graded:
        backward_plan = plan_for(BACKWARD, p.device, *sizes)
        if backward_plan is None:
            return None
    index = p.get_device()
    flat = p.dim() == 2
    see = Rows if p.is_cuda else viewed
    rows = p.numel() // columns
    loss_dtype = other(counted.dtype, p.dtype)
    return (forward_plan, backward_plan, index, flat, see, rows, columns, loss_dtype)


def plans_of(graded, p, q, counted):
    key = (
        p.shape, p.dtype, p.get_device(), q.shape, q.dtype, q.get_device(), counted.shape, counted.dtype,
        counted.get_device(), graded
    )
    try:
        return known[key]
    except KeyError:
        check(p, q, counted)
        if not p.is_cuda:
            return find(graded, p, q, counted)
        return keep(known, key, find(graded, p, q, counted))


def launch(plans, p, q, counted):
    forward_plan, _, index, flat, see, rows, columns, loss_dtype = plans
    p_whole = p.is_contiguous()
    q_whole = q.is_contiguous()
    counted_whole = counted.is_contiguous()
    loss = empty_like(p) if p_whole and loss_dtype is None else fresh(p, loss_dtype)
    if flat:
        forward_plan.launch(
            index,
            p if p_whole else as_rows(p),
            q if q_whole else as_rows(q),
            counted if counted_whole else counted.contiguous(),
            loss,
        )
    else:
        forward_plan.launch(
            index,
            see(p, (rows, columns)) if p_whole else as_rows(p),
            see(q, (rows, columns)) if q_whole else as_rows(q),
            see(counted, (rows,)) if counted_whole else counted.contiguous().view(-1),
            see(loss, (rows, columns)),
        )
    return loss


def launch_backward(plans, needs, dloss, p, q, counted):
    _, backward_plan, index, flat, see, rows, columns, _ = plans
    dloss_whole = dloss.is_contiguous()
    p_whole = p.is_contiguous()
    q_whole = q.is_contiguous()
    counted_whole = counted.is_contiguous()
    dp = empty_like(p) if p_whole else fresh(p)
    if flat:
        backward_plan.launch(
            index,
            dloss if dloss_whole else as_rows(dloss),
            p if p_whole else as_rows(p),
            q if q_whole else as_rows(q),
            counted if counted_whole else counted.contiguous(),
            dp,
        )
    else:
        backward_plan.launch(
            index,
            see(dloss, (rows, columns)) if dloss_whole else as_rows(dloss),
            see(p, (rows, columns)) if p_whole else as_rows(p),
            see(q, (rows, columns)) if q_whole else as_rows(q),
            see(counted, (rows,)) if counted_whole else counted.contiguous().view(-1),
            see(dp, (rows, columns)),
        )
    return dp


def fallback(p, q, counted):
    count_fallback(FORWARD)
    with uncast(p.device.type):
        return formula(p, q, counted)


def fallback_backward(dloss, p, q, counted):
    (dp,) = by_autograd(formula, (p, q, counted), (0,), (dloss,))
    return dp


class TvdElements(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, q, counted, plans):
        loss = launch(plans, p, q, counted)
        ctx.save_for_backward(p, q, counted)
        ctx.plans = plans
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx, dloss):
        p, q, counted = ctx.saved_tensors
        try:
            dp = launch_backward(ctx.plans, ctx.needs_input_grad, dloss, p, q, counted)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dp = fallback_backward(dloss, p, q, counted)
        return dp, None, None, None


def tvd_elements(p, q, counted):
    if is_compiling() or transforms() or (modes() and not p.is_meta):
        check(p, q, counted)
        if not is_compiling() and transforms():
            return fallback(p, q, counted)
        return registered(p, q, counted)
    graded = is_grad_enabled() and p.requires_grad
    plans = plans_of(graded, p, q, counted)
    if plans is None or ((q.requires_grad or counted.requires_grad) and is_grad_enabled()):
        return fallback(p, q, counted)
    try:
        if graded:
            return apply(p, q, counted, plans)
        return launch(plans, p, q, counted)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(p, q, counted)


def fake(p, q, counted):
    loss = p.new_empty(p.shape, dtype=counted.dtype)
    return loss


def fake_backward(dloss, p, q, counted):
    dp = p.new_empty(p.shape)
    return dp


def run(p, q, counted):
    plans = plans_of(False, p, q, counted)
    if plans is not None:
        try:
            return launch(plans, p, q, counted)
        except NoVariant as error:
            refused(FORWARD, error)
    loss = fallback(p, q, counted)
    return loss.contiguous()


def run_backward(dloss, p, q, counted):
    plans = plans_of(True, p, q, counted)
    if plans is None:
        count_fallback(BACKWARD)
        dp = fallback_backward(dloss, p, q, counted)
    else:
        try:
            dp = launch_backward(plans, (True, True, True), dloss, p, q, counted)
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dp = fallback_backward(dloss, p, q, counted)
    return dp


def save(ctx, inputs, output):
    p, q, counted = inputs
    ctx.save_for_backward(p, q, counted)
    ctx.scalars = ()


def derive(ctx, dloss):
    p, q, counted = ctx.saved_tensors
    dp = registered_backward(dloss, p, q, counted, *ctx.scalars)
    return dp, None, None
