"""cross_entropy, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(
    graded, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
):
    key = (
        logits.shape, logits.dtype, logits.get_device(), target.shape, target.dtype, target.get_device(), None if
        weight is None else (weight.shape, weight.dtype, weight.get_device()), label_smoothing > 0, softcap is not
        None, graded
    )
    try:
        return known[key]
    except KeyError:
        check(logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place)
        if not logits.is_cuda:
            return find(
                graded, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
            )
        return keep(
            known, key, find(graded, logits, target, weight, ignore_index, reduction, label_smoothing, softcap,
            z_loss, in_place)
        )


def fallback(logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place):
    count_fallback(FORWARD)
    with uncast(logits.device.type):
        return formula(
            logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
        )


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place, plans
    ):
        loss, lse, count, labels = launch(
            plans, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
        )
        ctx.save_for_backward(logits, lse, count, labels, weight)
        ctx.plans = plans
        ctx.scalars = (ignore_index, reduction, label_smoothing, softcap, z_loss, in_place)
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx, dloss):
        logits, lse, count, labels, weight = ctx.saved_tensors
        try:
            dlogits = launch_backward(
                ctx.plans, ctx.needs_input_grad, dloss, logits, lse, count, labels, weight, *ctx.scalars
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dlogits = fallback_backward(dloss, logits, lse, count, labels, weight, *ctx.scalars)
        return dlogits, None, None, None, None, None, None, None, None, None


def cross_entropy(logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place):
    if is_compiling() or transforms() or (modes() and not logits.is_meta):
        check(logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place)
        if not is_compiling() and transforms():
            return fallback(
                logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
            )
        return registered(
            logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
        )[0]
    graded = is_grad_enabled() and logits.requires_grad
    plans = plans_of(
        graded, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
    )
    if plans is None or ((weight is not None and weight.requires_grad) and is_grad_enabled()):
        return fallback(
            logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
        )
    try:
        if graded:
            return apply(
                logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place, plans
            )
        return launch(
            plans, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
        )[0]
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(
            logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
        )


def fake_backward(
    dloss, logits, lse, count, labels, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
):
    dlogits = logits.new_empty(logits.shape)
    return dlogits


def run(logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place):
    plans = plans_of(
        False, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
    )
    if plans is not None:
        try:
            return launch(
                plans, logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
            )
        except NoVariant as error:
            refused(FORWARD, error)
    loss = fallback(logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place)
    return loss.contiguous(), *rest(
        logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
    )


def run_backward(
    dloss, logits, lse, count, labels, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
):
    plans = plans_of(
        True, logits, labels, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
    )
    if plans is None:
        count_fallback(BACKWARD)
        dlogits = fallback_backward(
            dloss, logits, lse, count, labels, weight, ignore_index, reduction, label_smoothing, softcap, z_loss,
            in_place
        )
    else:
        try:
            dlogits = launch_backward(
                plans, (True, True, True, True, True, True, True, True, True), dloss, logits, lse, count, labels,
                weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dlogits = fallback_backward(
                dloss, logits, lse, count, labels, weight, ignore_index, reduction, label_smoothing, softcap,
                z_loss, in_place
            )
    return dlogits


def save(ctx, inputs, output):
    logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place = inputs
    loss, lse, count, labels = output
    ctx.save_for_backward(logits, lse, count, labels, weight)
    ctx.scalars = (ignore_index, reduction, label_smoothing, softcap, z_loss, in_place)


def derive(ctx, dloss, dlse, dcount, dlabels):
    logits, lse, count, labels, weight = ctx.saved_tensors
    dlogits = registered_backward(dloss, logits, lse, count, labels, weight, *ctx.scalars)
    return dlogits, None, None, None, None, None, None, None, None
