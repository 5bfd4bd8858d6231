"""sample, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(logits, temperature, top_k, top_p, min_p, seed, positions):
    if logits.dim() < 1:
        raise ValueError(f"sample: logits must have the shape [..., vocabulary], got {list(logits.shape)}")
    if temperature.shape != logits.shape[:-1]:
        raise ValueError(f"sample: temperature must have the shape {list(logits.shape[:-1])}, got {list(temperature.shape)}")
    if top_k.shape != logits.shape[:-1]:
        raise ValueError(f"sample: top_k must have the shape {list(logits.shape[:-1])}, got {list(top_k.shape)}")
    if top_p.shape != logits.shape[:-1]:
        raise ValueError(f"sample: top_p must have the shape {list(logits.shape[:-1])}, got {list(top_p.shape)}")
    if min_p.shape != logits.shape[:-1]:
        raise ValueError(f"sample: min_p must have the shape {list(logits.shape[:-1])}, got {list(min_p.shape)}")
    if seed.shape != logits.shape[:-1]:
        raise ValueError(f"sample: seed must have the shape {list(logits.shape[:-1])}, got {list(seed.shape)}")
    if positions.shape != logits.shape[:-1]:
        raise ValueError(f"sample: positions must have the shape {list(logits.shape[:-1])}, got {list(positions.shape)}")
    check_tensors("sample", "top_k", "seed", "positions", logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, positions=positions)


def find(graded, logits, temperature, top_k, top_p, min_p, seed, positions):
    if (
        not logits.numel() or temperature.dtype != torch.float32 or top_k.dtype != torch.int32 or top_p.dtype !=
        torch.float32 or min_p.dtype != torch.float32 or seed.dtype != torch.int64 or positions.dtype != torch.int64
        or not (logits.shape[-1] <= 524288)
    ):
        return None
    vocabulary = logits.shape[-1]
    sizes = (logits.numel() // vocabulary, vocabulary, logits.dtype)
    forward_plan = plan_for(FORWARD, logits.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    index = logits.get_device()
    flat = logits.dim() == 2
    see = Rows if logits.is_cuda else viewed
    rows = logits.numel() // vocabulary
    return (forward_plan, backward_plan, index, flat, see, rows, vocabulary)


def plans_of(graded, logits, temperature, top_k, top_p, min_p, seed, positions):
    key = (
        logits.shape, logits.dtype, logits.get_device(), temperature.shape, temperature.dtype,
        temperature.get_device(), top_k.shape, top_k.dtype, top_k.get_device(), top_p.shape, top_p.dtype,
        top_p.get_device(), min_p.shape, min_p.dtype, min_p.get_device(), seed.shape, seed.dtype, seed.get_device(),
        positions.shape, positions.dtype, positions.get_device(), graded
    )
    try:
        return known[key]
    except KeyError:
        check(logits, temperature, top_k, top_p, min_p, seed, positions)
        if not logits.is_cuda:
            return find(graded, logits, temperature, top_k, top_p, min_p, seed, positions)
        return keep(known, key, find(graded, logits, temperature, top_k, top_p, min_p, seed, positions))


def launch(plans, logits, temperature, top_k, top_p, min_p, seed, positions):
    forward_plan, _, index, flat, see, rows, vocabulary = plans
    logits_whole = logits.is_contiguous()
    temperature_whole = temperature.is_contiguous()
    top_k_whole = top_k.is_contiguous()
    top_p_whole = top_p.is_contiguous()
    min_p_whole = min_p.is_contiguous()
    seed_whole = seed.is_contiguous()
    positions_whole = positions.is_contiguous()
    ids = empty_like(seed) if seed_whole else fresh(seed)
    if flat:
        forward_plan.launch(
            index,
            logits if logits_whole else as_rows(logits),
            temperature if temperature_whole else temperature.contiguous(),
            top_k if top_k_whole else top_k.contiguous(),
            top_p if top_p_whole else top_p.contiguous(),
            min_p if min_p_whole else min_p.contiguous(),
            seed if seed_whole else seed.contiguous(),
            positions if positions_whole else positions.contiguous(),
            ids,
        )
    else:
        forward_plan.launch(
            index,
            see(logits, (rows, vocabulary)) if logits_whole else as_rows(logits),
            see(temperature, (rows,)) if temperature_whole else temperature.contiguous().view(-1),
            see(top_k, (rows,)) if top_k_whole else top_k.contiguous().view(-1),
            see(top_p, (rows,)) if top_p_whole else top_p.contiguous().view(-1),
            see(min_p, (rows,)) if min_p_whole else min_p.contiguous().view(-1),
            see(seed, (rows,)) if seed_whole else seed.contiguous().view(-1),
            see(positions, (rows,)) if positions_whole else positions.contiguous().view(-1),
            see(ids, (rows,)),
        )
    return ids


def fallback(logits, temperature, top_k, top_p, min_p, seed, positions):
    count_fallback(FORWARD)
    with uncast(logits.device.type):
        return formula(logits, temperature, top_k, top_p, min_p, seed, positions)


def sample(logits, temperature, top_k, top_p, min_p, seed, positions):
    if is_compiling() or transforms() or (modes() and not logits.is_meta):
        check(logits, temperature, top_k, top_p, min_p, seed, positions)
        if not is_compiling() and transforms():
            return fallback(logits, temperature, top_k, top_p, min_p, seed, positions)
        return registered(logits, temperature, top_k, top_p, min_p, seed, positions)
    plans = plans_of(False, logits, temperature, top_k, top_p, min_p, seed, positions)
    if plans is None:
        return fallback(logits, temperature, top_k, top_p, min_p, seed, positions)
    try:
        return launch(plans, logits, temperature, top_k, top_p, min_p, seed, positions)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(logits, temperature, top_k, top_p, min_p, seed, positions)


def fake(logits, temperature, top_k, top_p, min_p, seed, positions):
    ids = seed.new_empty(seed.shape, dtype=promoted(seed.dtype, positions.dtype))
    return ids


def run(logits, temperature, top_k, top_p, min_p, seed, positions):
    plans = plans_of(False, logits, temperature, top_k, top_p, min_p, seed, positions)
    if plans is not None:
        try:
            return launch(plans, logits, temperature, top_k, top_p, min_p, seed, positions)
        except NoVariant as error:
            refused(FORWARD, error)
    ids = fallback(logits, temperature, top_k, top_p, min_p, seed, positions)
    return ids.contiguous()
