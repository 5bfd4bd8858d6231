"""log_probs, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def plans_of(graded, logits, ids, temperature, softcap, ignore_index):
    key = (
        logits.shape, logits.dtype, logits.get_device(), ids.shape, ids.dtype, ids.get_device(), softcap is not
        None, ignore_index, graded
    )
    try:
        return known[key]
    except KeyError:
        check(logits, ids, temperature, softcap, ignore_index)
        if not logits.is_cuda:
            return find(graded, logits, ids, temperature, softcap, ignore_index)
        return keep(known, key, find(graded, logits, ids, temperature, softcap, ignore_index))


def fallback(logits, ids, temperature, softcap, ignore_index):
    count_fallback(FORWARD)
    with uncast(logits.device.type):
        return formula(logits, ids, temperature, softcap, ignore_index)


def refuse():
    raise RuntimeError("log_probs has no gradient, and one of its arguments requires one; call it under torch.no_grad(), or use linear_log_probs")


def log_probs(logits, ids, temperature, softcap, ignore_index):
    if is_grad_enabled() and logits.requires_grad:
        refuse()
    if is_compiling() or transforms() or (modes() and not logits.is_meta):
        check(logits, ids, temperature, softcap, ignore_index)
        if not is_compiling() and transforms():
            return fallback(logits, ids, temperature, softcap, ignore_index)
        return registered(logits, ids, temperature, softcap, ignore_index)
    plans = plans_of(False, logits, ids, temperature, softcap, ignore_index)
    if plans is None:
        return fallback(logits, ids, temperature, softcap, ignore_index)
    try:
        return launch(plans, logits, ids, temperature, softcap, ignore_index)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(logits, ids, temperature, softcap, ignore_index)


def fake(logits, ids, temperature, softcap, ignore_index):
    log_probs = ids.new_empty(ids.shape, dtype=promoted(logits.dtype, torch.float32))
    entropy = ids.new_empty(ids.shape, dtype=promoted(logits.dtype, torch.float32))
    return log_probs, entropy


def run(logits, ids, temperature, softcap, ignore_index):
    plans = plans_of(False, logits, ids, temperature, softcap, ignore_index)
    if plans is not None:
        try:
            return launch(plans, logits, ids, temperature, softcap, ignore_index)
        except NoVariant as error:
            refused(FORWARD, error)
    log_probs, entropy = fallback(logits, ids, temperature, softcap, ignore_index)
    return log_probs.contiguous(), entropy.contiguous()
