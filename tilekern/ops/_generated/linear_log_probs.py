"""linear_log_probs, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums):
    key = (
        hidden.shape, hidden.dtype, hidden.get_device(), weight.shape, weight.dtype, weight.get_device(), ids.shape,
        ids.dtype, ids.get_device(), None if bias is None else (bias.shape, bias.dtype, bias.get_device()), softcap
        is not None, ignore_index, graded
    )
    try:
        return known[key]
    except KeyError:
        check(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
        if not hidden.is_cuda:
            return find(graded, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
        return keep(
            known, key, find(graded, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
        )


def fallback(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums):
    count_fallback(FORWARD)
    with uncast(hidden.device.type):
        return formula(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)


def fallback_backward(
    dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse, temperature, softcap, ignore_index,
    wide_sums
):
    dhidden, dweight, dbias = by_autograd(
        formula, (hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums), (0, 1, 3), (dlog_probs,
        dentropy, dlse)
    )
    return dhidden, dweight, dbias


class LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums, plans):
        log_probs, entropy, lse = launch(
            plans, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums
        )
        ctx.save_for_backward(hidden, weight, ids, bias, entropy, lse)
        ctx.plans = plans
        ctx.scalars = (temperature, softcap, ignore_index, wide_sums)
        return log_probs, entropy, lse

    @staticmethod
    @differentiable_once
    def backward(ctx, dlog_probs, dentropy, dlse):
        hidden, weight, ids, bias, entropy, lse = ctx.saved_tensors
        try:
            dhidden, dweight, dbias = launch_backward(
                ctx.plans, ctx.needs_input_grad, dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse,
                *ctx.scalars
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dhidden, dweight, dbias = fallback_backward(
                dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse, *ctx.scalars
            )
        return dhidden, dweight, None, dbias, None, None, None, None, None


def linear_log_probs(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums):
    if is_compiling() or transforms() or (modes() and not hidden.is_meta):
        check(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
        if not is_compiling() and transforms():
            return fallback(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
        return registered(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    graded = is_grad_enabled() and (
        hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    plans = plans_of(graded, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    if plans is None:
        return fallback(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    try:
        if graded:
            return apply(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums, plans)
        return launch(plans, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)


def fake(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums):
    log_probs = ids.new_empty(ids.shape, dtype=promoted(hidden.dtype, weight.dtype, torch.float32))
    entropy = ids.new_empty(ids.shape, dtype=promoted(hidden.dtype, weight.dtype, torch.float32))
    lse = ids.new_empty(ids.shape, dtype=promoted(hidden.dtype, weight.dtype, torch.float32))
    return log_probs, entropy, lse


def fake_backward(
    dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse, temperature, softcap, ignore_index,
    wide_sums
):
    dhidden = hidden.new_empty(hidden.shape)
    dweight = weight.new_empty(weight.shape)
    dbias = dlog_probs.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return dhidden, dweight, dbias


def run(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums):
    plans = plans_of(False, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    if plans is not None:
        try:
            return launch(plans, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
        except NoVariant as error:
            refused(FORWARD, error)
    log_probs, entropy, lse = fallback(hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    return log_probs.contiguous(), entropy.contiguous(), lse.contiguous()


def run_backward(
    dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse, temperature, softcap, ignore_index,
    wide_sums
):
    plans = plans_of(True, hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums)
    if plans is None:
        count_fallback(BACKWARD)
        dhidden, dweight, dbias = fallback_backward(
            dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse, temperature, softcap, ignore_index,
            wide_sums
        )
    else:
        try:
            dhidden, dweight, dbias = launch_backward(
                plans, (True, True, True, True, True, True, True, True), dlog_probs, dentropy, dlse, hidden, weight,
                ids, bias, entropy, lse, temperature, softcap, ignore_index, wide_sums
            )
        except NoVariant as error:
            refused(BACKWARD, error)
            count_fallback(BACKWARD)
            dhidden, dweight, dbias = fallback_backward(
                dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse, temperature, softcap,
                ignore_index, wide_sums
            )
    return dhidden, dweight, dlog_probs.new_empty(0) if bias is None else dbias


def save(ctx, inputs, output):
    hidden, weight, ids, bias, temperature, softcap, ignore_index, wide_sums = inputs
    log_probs, entropy, lse = output
    ctx.save_for_backward(hidden, weight, ids, bias, entropy, lse)
    ctx.scalars = (temperature, softcap, ignore_index, wide_sums)


def derive(ctx, dlog_probs, dentropy, dlse):
    hidden, weight, ids, bias, entropy, lse = ctx.saved_tensors
    dhidden, dweight, dbias = registered_backward(
        dlog_probs, dentropy, dlse, hidden, weight, ids, bias, entropy, lse, *ctx.scalars
    )
    return dhidden, dweight, None, None if bias is None else dbias, None, None, None, None
